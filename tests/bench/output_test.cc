// Where commands write: to a stdout that is full or closed, to devices, FIFOs and links, and into
// folders that another process writes.
#include "engine/files/files.h"
#include "tests/bench/command.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A text to train on: one line.
std::string one_line() {
  std::string text;
  while (text.size() < 60'000) absl::StrAppend(&text, "word", text.size() % 97, " and another ");
  return text;
}

class Output : public testing::Test {
 protected:
  Output() { EXPECT_TRUE(engine::write_file_atomically(folder_.path("text"), one_line()).ok()); }

  std::string train() const {
    return absl::StrCat("train --preset tiny --steps 2 --threads 1 --data ", folder_.path("text"),
                        " --out ", folder_.path("model"));
  }
  const TemporaryFolder folder_;
};

constexpr const char* kWrite = "write_bw --loopback --provider shm -n 5 -s 8";
constexpr const char* kAllReduce = "all_reduce_perf -g 2 -b 8 -e 8 -n 1 --no-pin";

TEST_F(Output, WhatCannotBePrintedIsAFailure) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  const std::vector<std::string> commands = {"--help",
                                             "--version",
                                             "serve --help",
                                             "generate --help",
                                             "info",
                                             "info --json",
                                             "info --settings",
                                             "doctor",
                                             kWrite,
                                             "read_lat --loopback --provider tcp -n 5",
                                             kAllReduce,
                                             "gather_perf -g 2 -b 8 -e 8 -n 1 --no-pin",
                                             "kv_bw --provider shm --pages 1 --iters 1",
                                             train(),
                                             train() + " --ranks 2"};
  for (const std::string& command : commands) {
    EXPECT_EQ(script("exec \"$0\" " + command + " >/dev/null 2>&1").status, 0) << command;
    for (const char* where : {">/dev/full", ">&-"}) {
      const Ended ended = script("exec \"$0\" " + command + " 2>&1 " + where);
      EXPECT_EQ(ended.status, 1) << command << where;
      EXPECT_THAT(ended.output, HasSubstr("standard output could not be written"))
          << command << where;
    }
  }
}

TEST_F(Output, FilesThatAreNoFilesAreWrittenThrough) {
  const std::vector<std::string> flags = {std::string(kWrite) + " --json",
                                          std::string(kWrite) + " --out_json_file",
                                          std::string(kAllReduce) + " --json",
                                          std::string(kAllReduce) + " -J",
                                          "kv_bw --provider shm --pages 1 --iters 1 --json",
                                          "info --json",
                                          "doctor --json",
                                          train() + " --timeline",
                                          train() + " --curve"};
  const std::string fifo = folder_.path("fifo"), link = folder_.path("link");
  const std::string copy = folder_.path("copy"), target = folder_.path("target");
  ASSERT_EQ(0, mkfifo(fifo.c_str(), 0600));
  for (const std::string& flag : flags) {
    // A reader of a FIFO gets everything, once.
    const Ended ended =
        script(absl::StrCat("cat ", fifo, " >", copy, " & \"$0\" ", flag, " ", fifo, " && wait"));
    EXPECT_EQ(ended.status, 0) << flag << ended.output;
    EXPECT_TRUE(fs::is_fifo(fifo)) << flag;
    const auto piped = must(engine::read_file(copy));
    const bool json = flag.find("--curve") == std::string::npos;
    const bool whole = !Json::parse(piped, nullptr, false).is_discarded();
    EXPECT_TRUE(!json || whole || rows_in(copy).size() > 1) << piped;
    EXPECT_GT(piped.size(), 50u) << flag;

    fs::remove(target);
    fs::remove(link);
    fs::create_symlink("target", link);
    EXPECT_EQ(baton(flag + " " + link).status, 0) << flag;
    EXPECT_TRUE(fs::is_symlink(link)) << flag;
    EXPECT_GT(fs::file_size(target), 50u) << flag;
  }
}

TEST_F(Output, TwoTrainingsDoNotWriteOneFolder) {
  const std::string checkpoints = folder_.path("checkpoints");
  for (const std::string& folder : {folder_.path("model"), checkpoints}) {
    fs::create_directories(folder);
    const auto lock = must(engine::FolderLock::take(folder));
    for (const char* ranks : {"", " --ranks 2"}) {
      const Ended second = baton(train() + " --checkpoint " + checkpoints + ranks);
      EXPECT_EQ(second.status, 1) << second.output;
      EXPECT_THAT(second.output, HasSubstr(folder + " is being written by process "));
      EXPECT_THAT(second.output, testing::Not(HasSubstr("learning")));  // said before it begins
    }
  }
  // One folder for both is one lock, and it goes when the run ends.
  const std::string both = train() + " --checkpoint " + folder_.path("model");
  for (const char* again : {"", " --resume "}) {
    const std::string resume = *again != 0 ? again + folder_.path("model") : "";
    const Ended ended = baton(both + resume);
    EXPECT_EQ(ended.status, 0) << ended.output;
  }
  EXPECT_FALSE(fs::exists(folder_.path("model/.lock")));
}

TEST_F(Output, TwoDemosDoNotWriteOneFolder) {
  const auto lock = must(engine::FolderLock::take(folder_.path()));
  const Ended second = baton("demo --out " + std::string(folder_.path()));
  EXPECT_EQ(second.status, 2) << second.output;
  EXPECT_THAT(second.output, HasSubstr(" is being written by process "));
  EXPECT_FALSE(fs::exists(folder_.path("index.html")));
}

TEST_F(Output, RanksAreForkedOrStartedByALauncher) {
  const Ended two = script(
      "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 "
      "exec \"$0\" " +
      train() + " 2>&1");
  EXPECT_EQ(two.status, 1);
  EXPECT_THAT(two.output, HasSubstr("RANK=0 WORLD_SIZE=1"));
  EXPECT_THAT(two.output, HasSubstr("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"));
  for (const std::string& command : {train() + " --ranks 1", train() + " --ranks 2",
                                     std::string("all_reduce_perf --ranks 2 -b 8 -e 8"),
                                     std::string("all_reduce_perf -g 2 -b 8 -e 8")}) {
    const Ended ended = script(
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=7 exec \"$0\" " +
        command + " 2>&1");
    EXPECT_EQ(ended.status, 1) << command;
    EXPECT_THAT(ended.output, HasSubstr("but mpirun started this process as rank 1 of 2"))
        << command;
  }
}

}  // namespace
}  // namespace baton::bench

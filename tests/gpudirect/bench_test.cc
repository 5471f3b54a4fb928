// The benchmarks over memory of devices: every command verifies what arrived, says which memory it
// was and which way the bytes took, and refuses what it cannot have in one line.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/kv/kv_bw.h"
#include "bench/nccl_tests/collective_perf.h"
#include "bench/perftest/perf_options.h"
#include "bench/report/bench_memory.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/std.h"
#include "tests/temporary_folder.h"

namespace baton::bench {
namespace {

using gpudirect::CleanFake;
using gpudirect::InstalledFake;
using testing::HasSubstr;

struct Ran {
  int status = -1;
  std::string out, err;
  std::vector<Json> rows;
};

// Runs a command in this process, whose driver is the fake; its other side is a child.
Ran run(int (*command)(int, char**), const std::string& line) {
  const TemporaryFolder folder;
  const std::string file = folder.path("rows.jsonl");
  std::vector<std::string> words = absl::StrSplit(absl::StrCat(line, " --json ", file), ' ');
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ran ran;
  ran.status = command(static_cast<int>(arguments.size()), arguments.data());
  ran.out = testing::internal::GetCapturedStdout();
  ran.err = testing::internal::GetCapturedStderr();
  std::ifstream rows(file);
  for (std::string row; std::getline(rows, row);) {
    ran.rows.push_back(Json::parse(row, nullptr, false));
  }
  return ran;
}

// Over shm the other process maps the memory, over tcp it is staged.
void expect_moved(const Ran& ran, const std::string& line, bool mapped) {
  ASSERT_EQ(ran.status, 0) << line << "\n" << ran.out << ran.err;
  ASSERT_FALSE(ran.rows.empty()) << line;
  for (const Json& row : ran.rows) {
    EXPECT_EQ(row["verified"], true) << line;
    EXPECT_EQ(row["params"]["memory_kind"], "cuda:0") << line;
    EXPECT_EQ(row["params"]["memory"], "CUDA device 0") << line;
    EXPECT_EQ(row["params"]["path"], mapped ? "direct" : "staged") << line;
    EXPECT_THAT(row["route"].get<std::string>(),
                HasSubstr(mapped ? "CUDA IPC: " : "CUDA device 0: staged"))
        << line;
  }
}

TEST(BenchOnDevices, EveryPerftestVerifies) {
  for (const std::string provider : {"tcp", "shm"}) {
    for (const char* test :
         {"write_bw", "read_bw", "send_bw", "write_lat", "read_lat", "send_lat", "write_bw -b"}) {
      CleanFake gpu;
      const std::string line = absl::StrCat(test, " --loopback --no_pin --provider ", provider,
                                            " --use_cuda=0 -n 40 -s 70000");
      expect_moved(run(perf_main, line), line, provider == "shm");
    }
  }
}

TEST(BenchOnDevices, KvPagesVerify) {
  for (const std::string provider : {"tcp", "shm"}) {
    CleanFake gpu;
    const std::string line =
        absl::StrCat("kv_bw --no-pin --op both --pages 64 --page-bytes 4096 --iters 3 --provider ",
                     provider, " --memory cuda");
    const Ran ran = run(kv_bw_main, line);
    expect_moved(ran, line, provider == "shm");
    // A processor's copies of the host's memory say nothing of a device's, and take for ever.
    EXPECT_EQ(ran.out.find("device copy: a copy of as many bytes") != std::string::npos,
              provider == "shm");
  }
}

TEST(BenchOnDevices, EveryCollectiveVerifies) {
  struct Command {
    const char* name;
    bool direct = false;  // from device to device, as large sums go
  };
  for (const Command& command :
       {Command{"all_reduce_perf"}, Command{"all_gather_perf"}, Command{"reduce_scatter_perf"},
        Command{"broadcast_perf"}, Command{"reduce_perf"}, Command{"alltoall_perf"},
        Command{"sendrecv_perf"}, Command{"all_reduce_perf", true}}) {
    CleanFake gpu;
    const char* const sizes = command.direct ? " -b 1M -e 1M" : " -b 100K -e 100K";
    const Ran ran =
        run(collective_perf_main, absl::StrCat(command.name, " --ranks 2 --provider shm", sizes,
                                               " -n 2 -w 1 -c 1 --memory cuda"));
    ASSERT_EQ(ran.status, 0) << command.name << "\n" << ran.out << ran.err;
    ASSERT_FALSE(ran.rows.empty()) << command.name;
    const bool sums = std::string(command.name).find("reduce") != std::string::npos;
    for (const Json& row : ran.rows) {
      EXPECT_EQ(row["verified"], true) << command.name;
      EXPECT_EQ(row["params"]["memory_kind"], "cuda:0") << command.name;
      EXPECT_EQ(row["params"]["path"], command.direct ? "direct" : "staged") << command.name;
      // Who summed, and what the other would have cost.
      EXPECT_EQ(row.contains("sums"), sums) << command.name << row;
      if (command.direct) {
        EXPECT_THAT(row["sums"].get<std::string>(), HasSubstr("from device to device"));
      }
    }
    EXPECT_EQ(ran.out.find("\n#   sums of f32: ") != std::string::npos, sums) << command.name;
  }
}

// One byte of a device that is wrong is found, so "verified" says something.
TEST(BenchOnDevices, AWrongByteIsFound) {
  CleanFake gpu;
  auto worker = must(Worker::create({.providers = {"shm"}}));
  {
    auto memory = must(BenchMemory::make(*worker, 10 << 20, 0));
    BenchMemory& bench = *memory;
    EXPECT_TRUE(bench.on_device());
    for (size_t i = 0; i < bench.size(); ++i) bench.host()[i] = std::byte(i * 7 >> 3);
    ASSERT_TRUE(bench.load().ok());
    const auto at =
        static_cast<gpudirect::DevicePointer>(reinterpret_cast<uintptr_t>(bench.region().base));
    gpu.fake().write(at + (9 << 20), "\x55");
    std::fill_n(bench.host(), bench.size(), std::byte{0});
    ASSERT_TRUE(bench.fetch().ok());
    size_t wrong = 0;
    for (size_t i = 0; i < bench.size(); ++i) wrong += bench.host()[i] != std::byte(i * 7 >> 3);
    EXPECT_EQ(wrong, 1u);
    EXPECT_EQ(bench.host()[9 << 20], std::byte{0x55});
  }
  worker.reset();
}

TEST(BenchOnDevices, DmaBufOrAnError) {
  InstalledFake gpu({.attributes = gpudirect::without_dma_buf()});
  const Ran ran = run(perf_main,
                      "write_bw --loopback --no_pin --provider tcp --use_cuda=0 "
                      "--use_cuda_dmabuf -n 20 -s 1000");
  EXPECT_EQ(ran.status, 1);
  EXPECT_TRUE(ran.rows.empty());
  EXPECT_THAT(ran.err, HasSubstr("--use_cuda_dmabuf, but the memory is staged: "));
  EXPECT_THAT(ran.err, HasSubstr("staged through"));
}

struct Refused {
  const char* what;
  gpudirect::FakeOptions options;
  const char* device;
  const char* says;
};

TEST(BenchOnDevices, OneLineWhereThereIsNoSuchMemory) {
  const Refused cases[] = {
      {"no such device", {.devices = 1}, "3", "3"},
      {"a full device", {.memory_bytes = 2 << 20}, "0", "memory"},
      {"memory that cannot be pinned", {}, "0", "cuMemHostRegister"},
  };
  for (const Refused& refused : cases) {
    InstalledFake gpu(refused.options);
    if (std::string_view(refused.says) == "cuMemHostRegister") {
      gpu.fake().fail_next("cuMemHostRegister", gpudirect::kOutOfMemory);
    }
    const Ran ran = run(perf_main, absl::StrCat("write_bw --loopback --no_pin --provider tcp -n 20 "
                                                "-s 8388608 --use_cuda=",
                                                refused.device));
    EXPECT_EQ(ran.status, 1) << refused.what;
    EXPECT_THAT(ran.err, HasSubstr("baton write_bw: ")) << refused.what;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
  }
}

TEST(BenchOnDevices, AServerWithoutTheDeviceExitsAtOnce) {
  InstalledFake gpu({.devices = 1});
  for (const auto& [command, line] :
       {std::pair{&perf_main, "write_bw -p 0 --use_cuda=3"},
        std::pair{&kv_bw_main, "kv_bw --listen 127.0.0.1:0 --memory cuda:3"}}) {
    const Ran ran = run(command, line);
    EXPECT_EQ(ran.status, 1) << line;
    EXPECT_EQ(ran.out, "") << line;
    EXPECT_THAT(ran.err, HasSubstr("there is no CUDA device 3: this process sees 1")) << line;
  }
}

TEST(BenchOnDevices, KindsOfMemory) {
  EXPECT_EQ(*parse_memory_kind("host"), std::nullopt);
  EXPECT_EQ(*parse_memory_kind("cuda"), 0);
  EXPECT_EQ(*parse_memory_kind("cuda:3"), 3);
  EXPECT_EQ(memory_kind(3), "cuda:3");
  EXPECT_EQ(memory_kind(std::nullopt), "host");
  for (const char* bad : {"", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda0"}) {
    const auto parsed = parse_memory_kind(bad);
    ASSERT_FALSE(parsed.ok()) << bad;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("cuda:N")) << bad;
  }
}

// What a machine without a GPU says. Where there is one, the command works.
TEST(BenchOnDevices, WithoutADriverOneLine) {
  if (gpudirect::machine_driver().ok()) GTEST_SKIP() << "this machine has a CUDA driver";
  for (const char* line : {"write_bw --loopback --no_pin --provider tcp -n 20 --use_cuda=0",
                           "kv_bw --no-pin --provider tcp --iters 2 --pages 4 --memory cuda"}) {
    const Ran ran = run(line[0] == 'w' ? perf_main : kv_bw_main, line);
    EXPECT_EQ(ran.status, 1) << line;
    EXPECT_THAT(ran.err, HasSubstr("no GPU memory")) << line;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
  }
}

}  // namespace
}  // namespace baton::bench

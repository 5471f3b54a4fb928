// The ranks of a real mpirun find each other without being told where.
#include "tests/test.h"

namespace baton::launch {
namespace {

using testing::HasSubstr;

struct Ended {
  int status = -1;
  std::string output;
};

Ended run(const std::string& command) {
  Ended ended;
  FILE* pipe = popen((command + " 2>&1").c_str(), "re");
  if (pipe == nullptr) return ended;
  char bytes[4096];
  for (size_t n; (n = fread(bytes, 1, sizeof(bytes), pipe)) > 0;) ended.output.append(bytes, n);
  const int status = pclose(pipe);
  ended.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ended;
}

TEST(Mpirun, RanksMeet) {
  if (run("command -v mpirun").status != 0) GTEST_SKIP() << "there is no mpirun here";
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  if (run("mpirun --oversubscribe -n 3 true").status != 0) {
    GTEST_SKIP() << "mpirun cannot start three processes here";
  }
  const Ended ended = run("mpirun --oversubscribe -n 3 " BATON_MEET_PROGRAM);
  EXPECT_EQ(0, ended.status) << ended.output;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(ended.output,
                HasSubstr(absl::StrCat("mpirun rank ", rank, " of 3, local ", rank, " of 3\n")));
  }
}

// In a pod whose own variables say that there is one rank, each process would train alone.
TEST(Mpirun, AnotherLaunchersVariablesAreAContradiction) {
  if (run("mpirun --oversubscribe --allow-run-as-root -n 2 true").status != 0) {
    GTEST_SKIP() << "there is no mpirun here, or it cannot start two processes";
  }
  const Ended ended = run(
      "RANK=0 WORLD_SIZE=1 mpirun --oversubscribe --allow-run-as-root -n 2 " BATON_MEET_PROGRAM);
  EXPECT_NE(0, ended.status) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("RANK=0 WORLD_SIZE=1"));
  EXPECT_THAT(ended.output, HasSubstr("OMPI_COMM_WORLD_SIZE=2"));
}

}  // namespace
}  // namespace baton::launch

// Command lines as people type them after ib_write_bw and its sisters, recorded: each runs here, or
// is refused by the name of what is not here. And one server for all of them.
#include "tests/bench/perf_server_fixture.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

struct Recorded {
  const char* line;
  const char* refused = nullptr;  // what the refusal names; null: it runs
};

constexpr Recorded kRecorded[] = {
    {"ib_write_bw -d mlx5_0 -x 3 -F --report_gbits"},
    {"ib_write_bw -d mlx5_0 -i 1 -x 3 -s 65536 -n 500 -q 4 -t 64 -F"},
    {"ib_write_bw -d mlx5_0 -m 4096 -n 200 -b --report_gbits"},
    {"ib_write_bw -d mlx5_bond_0 -x 3 -a -n 5 -F --report_gbits"},
    {"ib_write_bw -F -d mlx5_0 -D 1 -f 0 -q 2 -t 32"},
    {"ib_write_bw -R -d mlx5_0 -n 100 -p 18516"},
    {"ib_write_bw --rdma_cm -T 105 -n 100"},
    {"ib_write_bw -s 8388608 -n 20 -t 16 -l 4 --tclass 106"},
    {"ib_write_bw -F -s 1024 -Q 64 -t 128 -l 16 -n 2048"},
    {"ib_write_bw --size=1048576 --iters=50 --qp=2 --tx-depth=32"},
    {"ib_write_bw -FNb -s 4096 -n 300"},
    {"ib_write_bw -n 100 -w 0.0001 -y 0.0000001"},
    {"ib_write_bw -n 100 --cpu_util"},
    {"ib_write_bw -n 100 -s 4096 --write_with_imm"},
    {"ib_write_bw -n 100 --perform_warm_up --disable_pcie_relaxed"},
    {"ib_write_bw -n 50 --output=bandwidth"},
    {"ib_write_bw -c RC -u 18 -S 3 -n 100"},
    {"ib_write_bw -e -n 100 -s 65536"},
    {"ib_read_bw -d mlx5_0 -x 3 -o 16 -n 200 -F"},
    {"ib_read_bw -d mlx5_0 -s 1048576 -n 50 -q 2 --report_gbits"},
    {"ib_read_bw -a -n 5 -F --data_validation"},
    {"ib_read_lat -d mlx5_0 -n 100 -o 1 -F"},
    {"ib_write_lat -d mlx5_0 -x 3 -n 200 -I 64 -F"},
    {"ib_write_lat -s 2 -n 1000 -F --output=latency"},
    {"ib_write_lat -a -n 10 -F"},
    {"ib_send_lat -d mlx5_0 -s 64 -n 100 -e"},
    {"ib_send_lat -D 1 -f 0 -F"},
    {"ib_send_bw -d mlx5_0 -s 4096 -n 500 -r 512 -S 3"},
    {"ib_send_bw -a -n 20 -F"},
    {"ib_send_bw -b -s 2048 -n 200 --retry_count 5"},
    {"ib_send_bw -s 1048576 -n 100 -b -r 16 -F"},
    {"ib_write_lat -H -n 1000"},
    {"ib_write_bw -O -d mlx5_0 -n 100"},
    {"ib_write_bw -z -d mlx5_0 -U -C -n 100"},
    {"ib_write_bw -W counters/port_xmit_data -n 100"},
    {"ib_write_bw -d mlx5_0 --use_cuda_dmabuf -s 1048576", "--use_cuda=N"},
    {"ib_write_bw --use_cuda_bus_id=0000:01:00.0", "--use_cuda=N"},
    {"ib_send_bw -c UD -d mlx5_0", "-c RC"},
    {"ib_write_bw -c DC -d mlx5_0", "-c RC"},
    {"ib_send_bw -g -M 255.1.2.3", "send_bw"},
    {"ib_write_bw --rate_limit=50 --rate_units=g", "-t 1"},
    {"ib_write_bw --odp -n 100", "--use_hugepages"},
    {"ib_write_bw --use-srq -n 100", "leave it out"},
    {"ib_read_bw --reversed", "read_bw"},
};

// Without the prefix: what `baton` takes.
std::string ours(const Recorded& recorded) { return recorded.line + strlen("ib_"); }

size_t descriptors_of(pid_t pid) {
  const std::filesystem::path folder = absl::StrCat("/proc/", pid, "/fd");
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                           std::filesystem::directory_iterator()));
}

// The server closes what its last clients had open: it hears of their end a little later.
void settles_at(pid_t pid, size_t most) {
  until([&] { return descriptors_of(pid) <= most; });
}

TEST_F(PerfServer, FiftyClientsInTurnAndNothingIsLeftBehind) {
  ASSERT_EQ(client("write_bw --provider tcp -n 20").status, 0);
  const size_t before = descriptors_of(server_.pid());
  std::vector<std::string> lines;
  for (const Recorded& recorded : kRecorded) {
    if (recorded.refused == nullptr) lines.push_back(ours(recorded));
  }
  ASSERT_GE(lines.size(), 25u);
  while (lines.size() < 50) lines.emplace_back("write_lat -s 8 -n 50");
  for (const std::string& line : lines) {
    SCOPED_TRACE(line);
    const Ended ended = client(line + " --provider tcp");
    EXPECT_EQ(ended.status, 0) << ended.output;
    if (line.find("--output") != std::string::npos) {
      EXPECT_GT(std::stod(ended.output), 0);
      continue;
    }
    const size_t sizes = line.find(" -a") == std::string::npos ? 1 : 23;
    EXPECT_EQ(table_rows(ended.output).size(), sizes) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr(" #bytes"));
  }
  settles_at(server_.pid(), before);
}

TEST_F(PerfServer, FourClientsAtOnce) {
  ASSERT_EQ(client("write_bw --provider tcp -n 20").status, 0);
  const size_t before = descriptors_of(server_.pid());
  std::vector<ChildProcess> clients;
  for (const char* line : {"write_bw -s 65536 -n 300", "read_bw -q 2 -n 200 --report_gbits",
                           "send_lat -s 32 -n 100", "write_lat -a -n 10"}) {
    clients.push_back(start(std::string(line) + " --provider tcp " + where_));
  }
  for (ChildProcess& each : clients) {
    const Ended ended = end_of(each);
    EXPECT_EQ(ended.status, 0) << ended.output;
    EXPECT_GE(table_rows(ended.output).size(), 1u) << ended.output;
  }
  expect_alive();
  settles_at(server_.pid(), before);
}

TEST(PerfRecorded, WhatIsNotHereIsRefusedByName) {
  for (const Recorded& recorded : kRecorded) {
    if (recorded.refused == nullptr) continue;
    SCOPED_TRACE(recorded.line);
    const Ended ended = baton(ours(recorded) + " 127.0.0.1:1");
    EXPECT_EQ(ended.status, 2);
    EXPECT_THAT(ended.output, HasSubstr(recorded.refused));
  }
}

TEST(PerfRecorded, ADeviceThatIsNotHereIsNamed) {
  const Ended ended = baton("write_bw -d no_such_device_0 127.0.0.1:1");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("baton doctor --provider verbs"));
  if (ended.output.find("not part of this program") != std::string::npos ||
      ended.output.find("no RDMA library") != std::string::npos ||
      ended.output.find("no provider") != std::string::npos) {
    GTEST_SKIP() << "no verbs here: " << ended.output;
  }
  EXPECT_THAT(ended.output, HasSubstr("no_such_device_0"));
}

}  // namespace
}  // namespace baton::bench

// Agents of two processes, both with memory of devices: mapped by CUDA IPC over shm, staged over
// tcp. One is killed while bytes of it move.
#include "tests/gpudirect/agents/device_agents.h"
#include "tests/std.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kBytes = 8 << 20;
struct Between {
  const char* name;
  const char* provider;
  bool staged;
  Block::Of of = Block::Of::kSlab;
};

std::string numbers(const Descriptor& d) { return {reinterpret_cast<const char*>(&d), sizeof d}; }

// A process of its own. It offers a block, hears metadata, then answers every message with whether
// all of its bytes are those of the seed that the message names, until it is killed.
pid_t serve(const Between& way, int in, int out) {
  const pid_t child = fork();
  if (child != 0) return child;
  InstalledFake driver;
  const std::unique_ptr<Agent> agent = device_agent("beta", way.provider);
  const Block block(way.of, *agent, driver, kBytes, 100);
  const std::string offer = numbers(block.whole()) + *agent->metadata();
  if (write(out, offer.data(), offer.size()) < 0) _exit(1);
  char theirs[4096];
  const ssize_t heard = read(in, theirs, sizeof theirs);
  if (heard <= 0 || !agent->add_remote({theirs, static_cast<size_t>(heard)}).ok()) _exit(2);
  while (getppid() != 1) {
    agent->progress();
    for (const AgentMessage& message : agent->messages()) {
      const auto seed = static_cast<size_t>(std::stoul(message.payload));
      const std::vector<std::byte> bytes = block.bytes();
      size_t right = 0;
      while (right < kBytes && bytes[right] == std::byte((right * 7 + seed) % 251)) ++right;
      agent->notify("alpha", right == kBytes ? "the same" : "differs").IgnoreError();
    }
  }
  _exit(0);
}

class DeviceProcesses : public testing::TestWithParam<Between> {};

TEST_P(DeviceProcesses, EveryByteArrivesAndAKilledOneLeavesNothing) {
  for (const int rounds : {0, 1, 3, 10, 30}) {
    SCOPED_TRACE(rounds);
    int to[2], from[2];
    ASSERT_EQ(pipe(to) + pipe(from), 0);
    const pid_t child = serve(GetParam(), to[0], from[1]);
    char offer[4096];
    const ssize_t size = read(from[0], offer, sizeof offer);
    ASSERT_GT(size, 100);
    Descriptor there;
    std::memcpy(&there, offer, sizeof there);
    InstalledFake driver;
    {
      const std::unique_ptr<Agent> agent = device_agent("alpha", GetParam().provider);
      Block mine(GetParam().of, *agent, driver, kBytes, 3);
      const absl::StatusOr<std::string> name =
          agent->add_remote({offer + sizeof there, static_cast<size_t>(size) - sizeof there});
      ASSERT_TRUE(name.ok()) << name.status();
      const std::string metadata = *agent->metadata();
      ASSERT_EQ(write(to[1], metadata.data(), metadata.size()),
                static_cast<ssize_t>(metadata.size()));
      const auto until = [&](auto&& ready) { run_agents(*agent, *agent, ready); };
      const auto made = [&](Op op, std::string_view message) {
        return agent->make_transfer(op, {{mine.whole()}}, {{there}}, "beta", message,
                                    MemoryKind::kVram, MemoryKind::kVram);
      };
      const auto moved = [&](AgentTransferId move) {
        EXPECT_TRUE(agent->post(move).ok());
        until([&] { return *agent->state(move) != AgentTransferState::kRunning; });
        EXPECT_TRUE(agent->status(move).ok()) << agent->status(move);
        EXPECT_TRUE(agent->release(move).ok());
      };
      moved(*made(Op::kWrite, "3"));
      std::vector<AgentMessage> answers;
      until([&] { return !(answers = agent->messages()).empty(); });
      EXPECT_EQ(answers[0].payload, "the same");
      const std::vector<std::byte> sent = mine.bytes();
      mine.fill(77);
      moved(*made(Op::kRead, {}));
      EXPECT_TRUE(mine.bytes() == sent) << "what was written is read back";
      EXPECT_EQ(agent->stats().worker.staged_transfers > 0, GetParam().staged)
          << agent->explain("beta");

      const auto last = made(Op::kRead, {});
      ASSERT_TRUE(agent->post(*last).ok());
      for (int i = 0; i < rounds; ++i) agent->progress();
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
      until([&] { return *agent->state(*last) != AgentTransferState::kRunning; });
      const absl::Status end = agent->status(*last);
      EXPECT_TRUE(end.ok() || absl::IsUnavailable(end)) << end;
      EXPECT_TRUE(agent->release(*last).ok());
      mine.fill(50);
      const std::vector<std::byte> reused = mine.bytes();
      until([&] { return !agent->has_remote("beta"); });
      driver.fake().run_all();
      EXPECT_TRUE(mine.bytes() == reused) << "bytes came after the release";
      mine.take_back();
      EXPECT_EQ(driver.fake().queued(), 0u);
    }
    driver.expect_clean();
    for (const int fd : {to[0], to[1], from[0], from[1]}) close(fd);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceProcesses,
                         testing::Values(Between{"ipc", "shm", false},
                                         Between{"ipc_handles", "shm", false, Block::Of::kDevice},
                                         Between{"tcp", "tcp", true}),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace baton::kvtransfer

// A child that was forked ends, and with it its copies of what its parent has open: workers,
// agents, communicators. The parent's go on.
#include <pthread.h>

#include <semaphore>

#include "kvtransfer/agent.h"
#include "kvtransfer/baton_connector.h"
#include "tests/communicator/group.h"
#include "tests/hostile/worker_side.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/usable_provider.h"

namespace baton {
namespace {

using hostile::WorkerSide;

const Time kLong = until_gives_up();

class Forked : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "a sanitizer's threads do not live on in a forked child";
    if (const std::string why = why_unusable(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
};

// As exit() does it in a child whose parent keeps them in static objects, or main() when it
// returns.
void end_in_a_child(const std::function<void()>& destroy) {
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    destroy();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child hung or died";
}

TEST_P(Forked, AgentsOfTheParentGoOn) {
  using namespace kvtransfer;  // NOLINT: an agent's words
  auto a = make_agent(agent_options("a", GetParam())),
       b = make_agent(agent_options("b", GetParam()));
  AgentMemory from(*a, 1 << 20, 1), to(*b, 1 << 20, 2);
  introduce(*a, *b);
  const AgentTransferId put = *a->make_transfer(Op::kWrite, {from.whole()}, {to.whole()}, "b");
  ASSERT_EQ(a->post(put), absl::OkStatus());
  ASSERT_EQ(a->wait(put, kLong), absl::OkStatus());
  to.bytes.assign(to.bytes.size(), 0);
  end_in_a_child([&] {
    a.reset();
    b.reset();
  });
  ASSERT_EQ(a->post(put), absl::OkStatus());
  EXPECT_EQ(a->wait(put, kLong), absl::OkStatus());
  EXPECT_TRUE(to.bytes == from.bytes);
}

void drive_and_connect(WorkerSide& a, WorkerSide& b) {
  a.drive();
  b.drive();
  a.peer = *a.worker->connect(b.worker->address());
}

TEST_P(Forked, WorkersThreadsAndPoolsOfTheParentGoOn) {
  WorkerSide a(GetParam()), b(GetParam());
  drive_and_connect(a, b);
  const TransferRequest put = a.write(b);
  ASSERT_EQ(a.worker->wait(*a.worker->submit(put), kLong), absl::OkStatus());
  end_in_a_child([&] {
    a.end();
    b.end();
  });
  std::fill_n(a.block.data, a.block.size, std::byte{7});
  EXPECT_EQ(a.worker->wait(*a.worker->submit(put), kLong), absl::OkStatus());
  EXPECT_EQ(b.block.data[b.block.size - 1], std::byte{7});
}

// A round of progress holds locks of OpenSSL, UCX and others, which a child would find taken.
TEST_P(Forked, AForkWaitsForARoundOfProgress) {
  static std::counting_semaphore<> forking(0), inside(0);
  static std::atomic<bool> watched{false}, over{false};
  static const int at_fork = pthread_atfork(
      [] {
        if (watched) forking.release();
      },
      nullptr, nullptr);
  ASSERT_EQ(at_fork, 0);
  WorkerSide a(GetParam()), b(GetParam());
  drive_and_connect(a, b);
  TransferRequest put = a.write(b, 4096);
  put.on_end = [](void*, TransferId, const absl::Status&) {
    inside.release();
    forking.acquire();
    // Nobody needs this time: a fork that does not wait is over by then.
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    over = true;
  };
  for (int round = 0; round < 3; ++round) {
    over = false;
    watched = true;
    // By another thread than the one that forks, whoever moves the bytes.
    std::thread other([&] { (void)a.worker->wait(*a.worker->submit(put), kLong); });
    inside.acquire();
    end_in_a_child([&] {
      if (!over) _exit(1);
    });
    watched = false;
    other.join();
  }
}

// Promise(agents): A forked child cannot use its parent's workers or agents, and touches nothing of
//   theirs when it ends | objects know the process that made them; `agent_forked_test` calls agents
TEST_P(Forked, CallsOfAParentsWorkerAreRefused) {
  WorkerSide a(GetParam()), b(GetParam());
  drive_and_connect(a, b);
  end_in_a_child([&] {
    const auto refused = [](const absl::Status& status) {
      if (absl::IsInvalidArgument(status) &&
          status.message().find("forked") != absl::string_view::npos) {
        return;
      }
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      _exit(1);
    };
    Worker& worker = *a.worker;
    refused(worker.register_memory(a.block.data, a.block.size).status());
    refused(worker.deregister_memory(a.block.region));
    refused(worker.connect(b.worker->address()).status());
    refused(worker.disconnect(a.peer));
    refused(worker.submit({.peer = a.peer}).status());
    refused(worker.notify(a.peer, "hello").status());
    refused(worker.notify_detached(a.peer, "hello"));
    refused(worker.wait_until([] { return true; }));
    if (worker.progress() || worker.help()) _exit(2);
  });
}

TEST_P(Forked, ConnectorsOfTheParentGoOn) {
  kvtransfer::BatonConnectorOptions options;
  options.worker = {.name = "decode", .providers = {GetParam()}, .key = test_key()};
  auto connector = *kvtransfer::make_baton_connector(options);
  end_in_a_child([&] {
    if (connector->start_load({.id = 1, .prefill = connector->address()}).ok()) _exit(1);
    connector.reset();
  });
  connector->progress();
  EXPECT_FALSE(connector->address().empty());
  connector.reset();
}

TEST_P(Forked, CommunicatorsOfTheParentGoOn) {
  CommunicatorOptions options = test_options(GetParam());
  options.background = true;
  run_group(2, options, [](Communicator& comm) {
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    if (comm.rank() == 0) end_in_a_child([&] { comm.~Communicator(); });
    float data = 1;
    EXPECT_EQ(comm.all_reduce(&data, &data, 1, DataType::kF32, ReduceOp::kSum), absl::OkStatus());
    EXPECT_EQ(data, 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Forked, testing::Values("shm", "tcp"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace baton

// What a small call costs over tcp in system calls, counted where they leave the process.
#include <sys/syscall.h>

#include "tests/communicator/group.h"
#include "tests/std.h"
#include "transport/clock.h"

namespace {
struct Calls {
  std::atomic<int64_t> sends{0};     // that moved something
  std::atomic<int64_t> receives{0};  // the same
  std::atomic<int64_t> questions{0};
};
Calls calls;  // of both ranks
}  // namespace

// In place of the C library's, in this program alone.
extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const ssize_t moved = syscall(SYS_sendmsg, fd, message, flags);
  calls.sends += moved > 0 ? 1 : 0;
  return moved;
}
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  const ssize_t moved = syscall(SYS_recvmsg, fd, message, flags);
  calls.receives += moved > 0 ? 1 : 0;
  return moved;
}
extern "C" int getsockopt(int fd, int level, int name, void* value, socklen_t* size) noexcept {
  ++calls.questions;
  return static_cast<int>(syscall(SYS_getsockopt, fd, level, name, value, size));
}

namespace baton {
namespace {

// `between`: how far each rank turns the clock before each of its calls. It moves by nothing else,
// so nothing is late because the machine is busy.
void count_calls(Time between) {
  constexpr int kWarm = 300;
  constexpr int kCalls = 1000;
  // Where the ranks stand when the counting begins and ends, and credit for announcements.
  constexpr int64_t kSlack = kCalls / 50;
  CallOptions one_message;  // what would be chosen depends on the times that calls take
  one_message.algorithm = Algorithm::kRecursiveDoubling;
  ManualClock clock;
  CommunicatorOptions options = test_options("tcp");
  options.worker.clock = &clock;
  run_group(2, options, [&](Communicator& comm) {
    float in[2] = {1, 2};
    float out[2] = {};
    const auto call = [&] {
      clock.advance(between);
      ASSERT_TRUE(comm.all_reduce(in, out, 2, DataType::kF32, ReduceOp::kSum, one_message).ok());
      ASSERT_EQ(out[0], 2);
      ASSERT_EQ(out[1], 4);
    };
    for (int i = 0; i < kWarm; ++i) call();
    const int64_t sends = calls.sends;
    const int64_t receives = calls.receives;
    const int64_t questions = calls.questions;
    for (int i = 0; i < kCalls; ++i) call();
    EXPECT_LE(calls.sends - sends, 2 * kCalls + kSlack)
        << "slots given back and acknowledgements ride on data";
    EXPECT_LE(calls.receives - receives, 2 * kCalls + kSlack);
    EXPECT_LE(calls.questions - questions, kSlack);
  });
}

// Promise(collectives): An all_reduce of 8 bytes over tcp costs each of two ranks one `sendmsg` and
//   one `recvmsg` | acknowledgements ride on the next call
TEST(SmallCalls, EachCostsOneSendAndOneReceive) { count_calls(Time::zero()); }

// Nobody waits for the acknowledgement of a small message: it may come with the next call, be that
// later than point-to-point senders would want it.
TEST(SmallCalls, TheSameWhereRanksComputeBetweenThem) {
  count_calls(std::chrono::microseconds(200));
}

}  // namespace
}  // namespace baton

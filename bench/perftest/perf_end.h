// One end of a test: its memory and counter, the other end's region and counter, and the check of
// the bytes that arrived. Both sides have one; they differ only in which one sends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/perftest/perf_plan.h"
#include "bench/report/bench_memory.h"
#include "transport/worker.h"

namespace baton::bench {

// The requirements on an end's memory.
struct PerfMemory {
  bool huge_pages = false;    // or nothing
  std::optional<int> device;  // a CUDA device's instead of the host's
};

// Not thread-safe. Destroy it when no transfer of it is open, before its worker.
class PerfEnd {
 public:
  // Allocates two areas: one to send from, one to receive into.
  static absl::StatusOr<std::unique_ptr<PerfEnd>> create(Worker& worker, PeerId peer,
                                                         const PerfPlan& plan,
                                                         const PerfMemory& memory);
  ~PerfEnd();
  PerfEnd(const PerfEnd&) = delete;
  PerfEnd& operator=(const PerfEnd&) = delete;

  // The member "ends" of a message: what the other side needs to reach this one; and its use there.
  absl::StatusOr<Json> describe() const;
  absl::Status attach(const Json& message);

  // Pattern into what is sent, poison into what is received; both out of the caches when cold. An
  // error is a device's.
  absl::Status prepare(const PerfRun& run);
  const PerfRun& run() const { return run_; }
  const PerfPlan& plan() const { return plan_; }
  Worker& worker() { return worker_; }
  PeerId peer() const { return peer_; }
  const std::string& backing() const { return memory_->backing(); }

  // The transfer of message `number`: a write or a read. Of a send test a write into the next
  // receive of the other side that raises its counter.
  TransferRequest request(uint64_t number) const;

  // Latency by writes. The last byte of a message tells how often its place was used: mark() sets
  // it before message `number` is sent, marked() tells that it has arrived here. With a plan of
  // `immediate` the counter tells, and the marks are only checked. No CPU sets or sees the last
  // byte of memory of a device: where an end's is one, a counter tells and there are no marks.
  void mark(uint64_t number);
  bool marked(uint64_t number) const;

  // Bandwidth by sends. The sender: whether the other side has a receive open for one more message,
  // and that one was sent.
  bool may_send() const;
  void count_sent() { ++sent_; }
  // The receiver: takes in what has arrived, and opens as many receives again. True if it told so.
  bool take_in();
  // Messages that the counter tells of, since the run began.
  uint64_t messages_arrived() const { return worker_.counter_value(counter_) - counted_; }

  // The check of `messages` messages that were written to, or read by, this end. DataLoss names the
  // first byte that is wrong. Poisons what it checked.
  absl::Status verify(uint64_t messages);

 private:
  PerfEnd(Worker& worker, PeerId peer, const PerfPlan& plan)
      : worker_(worker), peer_(peer), plan_(plan) {}
  size_t slot(uint64_t number) const { return number % slots_; }
  uint8_t mark_of(uint64_t number) const { return static_cast<uint8_t>(number / slots_ + 1); }
  bool writes() const { return plan_.test.verb != PerfTest::Verb::kRead; }
  bool sends() const { return plan_.test.verb == PerfTest::Verb::kSend; }
  bool counts() const {
    return sends() || (writes() && (plan_.immediate || (unseen_ && plan_.test.latency)));
  }
  bool marks() const { return plan_.test.latency && writes() && !unseen_; }
  Layout payload(size_t messages) const;

  Worker& worker_;
  const PeerId peer_;
  const PerfPlan plan_;
  std::unique_ptr<BenchMemory> memory_;
  bool unseen_ = false;  // memory of an end is a device's
  std::byte* tx_ = nullptr;
  std::byte* rx_ = nullptr;
  CounterId counter_;
  uint64_t counted_ = 0;  // its value when the run began
  RemoteRegion remote_;
  size_t remote_offset_ = 0;
  RemoteCounter remote_counter_;
  PerfRun run_;
  size_t slots_ = 1;  // places that messages go to in turn
  size_t used_ = 0;   // bytes of an area that this run can touch, and some more
  // Send tests only; counts over all runs of the connection.
  CounterId credits_;  // what the other side has taken in
  RemoteCounter remote_credits_;
  uint64_t sent_ = 0;
  uint64_t told_ = 0;  // of what arrived, to the other side
};

}  // namespace baton::bench

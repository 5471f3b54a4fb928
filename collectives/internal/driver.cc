// Advancing the executor and the worker, and the loops of waiting callers.
#include "collectives/internal/driver.h"

#include <thread>

#include "absl/strings/str_format.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {
namespace {

// How long a waiting thread polls before it lets others run, and before it sleeps.
constexpr Time kSpin = std::chrono::microseconds(50);
constexpr Time kYield = std::chrono::microseconds(1000);
// Even if no event wakes us: deadlines, and peers whose wake-up call was lost with them.
constexpr Time kLongestSleep = std::chrono::milliseconds(10);
constexpr uint32_t kTurnsPerTick = 64;
// Turns of the executor before a blocking call lets others at the communicator: some microseconds.
constexpr int kShortCall = 100;

absl::Status still_runs(Time timeout) {
  return absl::DeadlineExceededError(absl::StrFormat(
      "the call still runs after the %.3f s of this wait: wait again, or abort() the communicator",
      std::chrono::duration<double>(timeout).count()));
}

}  // namespace

bool Driver::advance() {
  const bool accessed = needs_.windows.advance();
  if (!needs_.failure.broken().ok()) {
    // Only a reconfigure() continues after a failure: look(), which tick() calls, advances it.
    if (!needs_.failure.ending()) return !needs_.calls.in_flight().empty() && tick();
    tick();
    needs_.failure.end_calls();
    return !needs_.failure.ending();
  }
  absl::StatusOr<bool> moved = needs_.executor.advance();
  if (!moved.ok()) {
    needs_.failure.on_executor_error(moved.status());
    return true;
  }
  bool any = *moved || accessed;
  const bool on_devices = needs_.calls.any_on_devices();
  if (on_devices) {
    moved = needs_.calls.advance_devices();
    if (!moved.ok()) {
      tick();  // a peer that is gone is the better reason
      needs_.failure.fail(moved.status(), needs_.mesh.rank());
      return true;
    }
    any |= *moved;
  }
  const bool any_transfer =
      needs_.mesh.any_transfer() || on_devices || needs_.windows.needs_worker();
  // A call that has ended and has nothing to send leaves the worker in peace: a round of progress
  // costs system calls.
  const bool over = needs_.calls.any_done();
  const bool accesses = needs_.windows.under_way();
  if (any_transfer ? needs_.mesh.submitted() || !over : !any && ++turns_ % kTurnsPerTick == 0) {
    any |= tick();
    if (accesses) any |= needs_.windows.advance();  // over shm they have landed
  }
  if (absl::Status status = needs_.mesh.publish_regions(); !status.ok()) {
    needs_.failure.fail(status, needs_.mesh.rank());
  }
  if (needs_.calls.any_done()) {
    // A control message that says "I called something else" comes with the data, not after it.
    if (any_transfer) needs_.mesh.drain();
    needs_.calls.finish();
  }
  if (needs_.calls.any_leaving()) {
    any = true;
    if (absl::Status status = needs_.calls.copy_out(); !status.ok()) {
      needs_.failure.fail(status, needs_.mesh.rank());
    }
  }
  // A call that only waits for a device hears the others above.
  return any || needs_.executor.combining() || needs_.calls.any_under_way_on_devices();
}

bool Driver::tick() {
  if (needs_.mesh.any_wanted()) needs_.mesh.make_links();
  const bool any = needs_.mesh.endpoint().tick();
  needs_.failure.look(needs_.mesh.endpoint().ticked_at());
  return any;
}

void Driver::tick_sometimes() {
  if (needs_.mesh.ranks() > 1 && needs_.mesh.now() >= needs_.failure.next_look()) tick();
}

std::optional<absl::Status> Driver::run_short(Work work) {
  for (int turn = 0; turn < kShortCall && !background() && !needs_.mesh.crowded(); ++turn) {
    if (std::optional<absl::Status> result = needs_.calls.reap(work)) return result;
    advance();
  }
  return std::nullopt;
}

void Driver::call_started() {
  advance();
  if (background()) needs_.mesh.endpoint().call_started();
}

absl::Status Driver::wait_for_background(Work work, Time deadline) {
  constexpr Time kLookAtClock = std::chrono::milliseconds(10);
  std::unique_lock lock(needs_.mutex);
  while (true) {
    std::optional<absl::Status> result;
    const auto over = [&] { return (result = needs_.calls.reap(work)).has_value(); };
    if (deadline == kNever) {
      needs_.calls.ended().wait(lock, over);
    } else {
      needs_.calls.ended().wait_for(lock, kLookAtClock, over);
    }
    if (result.has_value()) return *std::move(result);
    if (needs_.mesh.now() >= deadline) return absl::DeadlineExceededError("");
  }
}

absl::Status Driver::wait(Work work, Time timeout) {
  if (!background()) return drive(work, timeout, true);
  absl::Status status = wait_for_background(work, base::deadline_after(needs_.mesh.now(), timeout));
  return absl::IsDeadlineExceeded(status) && status.message().empty() ? still_runs(timeout)
                                                                      : status;
}

absl::Status Driver::drive(Work work, Time timeout, bool callbacks) {
  EndpointImpl& endpoint = needs_.mesh.endpoint();
  const Time deadline = base::deadline_after(needs_.mesh.now(), timeout);
  Time idle_since = Time::zero();
  for (uint32_t turn = 0;; ++turn) {
    bool moved = false;
    bool ended = false;
    bool crowded = false;
    {
      std::lock_guard lock(needs_.mutex);
      if (std::optional<absl::Status> result = needs_.calls.reap(work)) return *std::move(result);
      moved = advance();
      // The others may be in a call of another group, and come to this one behind it.
      if (!moved) moved = endpoint.advance_others(group_);
      ended = callbacks && endpoint.any_ended();
      crowded = needs_.mesh.crowded();
    }
    if (ended) endpoint.run_callbacks();
    if (moved || ended) {
      idle_since = Time::zero();
      continue;
    }
    // The clock is not free: look at it now and then.
    if (turn % 16 != 0 && !crowded) continue;
    const Time time = needs_.mesh.now();
    if (time >= deadline) return still_runs(timeout);
    if (idle_since == Time::zero()) idle_since = time;
    const Time idle = time - idle_since;
    if (idle > kYield) {
      doze(std::min(kLongestSleep, deadline - time));
      // The event that woke the thread may come again at once: sleeping and waking costs more than
      // polling.
      idle_since = needs_.mesh.now() - kYield + kSpin;
    } else if (crowded || idle > kSpin) {
      std::this_thread::yield();
    }
  }
}

bool Driver::wait_until(const std::function<bool()>& over, Time timeout) {
  EndpointImpl& endpoint = needs_.mesh.endpoint();
  const Time deadline = base::deadline_after(needs_.mesh.now(), timeout);
  while (true) {
    const uint64_t ticket = endpoint.nap_ticket();
    bool moved = false;
    {
      std::lock_guard lock(needs_.mutex);
      moved = tick();
      moved |= endpoint.advance_others(nullptr);
      if (over()) return true;
    }
    endpoint.run_callbacks();
    const Time time = needs_.mesh.now();
    if (time >= deadline) return false;
    if (!moved) {
      endpoint.nap(std::min<Time>(std::chrono::milliseconds(2), deadline - time), ticket);
    }
  }
}

void Driver::doze(Time longest) {
  EndpointImpl& endpoint = needs_.mesh.endpoint();
  const uint64_t ticket = endpoint.nap_ticket();
  bool any;
  {
    std::lock_guard lock(needs_.mutex);
    endpoint.begin_sleep();
    any = advance() || endpoint.advance_others(group_);
  }
  if (!any) {
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    endpoint.nap(longest, ticket);
  }
  std::lock_guard lock(needs_.mutex);
  endpoint.end_sleep();
}

}  // namespace baton::collectives::internal

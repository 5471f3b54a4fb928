// What orders the fake's streams: waits for events and values.
#include "absl/strings/str_cat.h"
#include "tests/gpudirect/fake/entries.h"

namespace baton::gpudirect {

// Whether nothing holds up this operation, the next of its stream.
bool FakeDriver::may_run(const Operation& operation) {
  if (!operation.order.has_value()) return true;
  const Order& order = *operation.order;
  if (order.kind == Order::Kind::kWaitEvent) {
    const auto event = events_.find(order.event);
    return event == events_.end() || event->second.happened >= order.recorded;
  }
  if (!pinned(order.address, 8)) return true;  // a violation, when it runs
  const uint64_t now = __atomic_load_n(
      reinterpret_cast<const uint64_t*>(static_cast<uintptr_t>(order.address)), __ATOMIC_ACQUIRE);
  return static_cast<int64_t>(now - order.value) >= 0;
}

void FakeDriver::execute(const Order& order) {
  if (order.kind == Order::Kind::kWaitEvent) return;
  if (!pinned(order.address, 8)) {
    violate(Rule::kLifetime, "cuStreamWaitValue64", "its memory went away before it ran");
    return;
  }
}

bool FakeDriver::stuck() {
  const std::lock_guard lock(mutex_);
  bool any = false;
  for (const auto& [stream, queue] : streams_) {
    if (queue.empty()) continue;
    any = true;
    if (may_run(queue.front())) return false;
  }
  return any;
}

struct FakeOrderCalls {
  using Order = FakeDriver::Order;

  static Result queue(const FakeCall& call, Stream stream, const Order& order) {
    auto* const queue = call.queue(stream);
    if (queue == nullptr) return kInvalidHandle;
    queue->push_back({.number = call.fake.next_operation_++, .order = order});
    return kSuccess;
  }

  static Result wait_event(const FakeCall& call, Stream stream, Event event, unsigned flags) {
    const auto found = call.fake.events_.find(event);
    if (found == call.fake.events_.end() || flags != 0) {
      call.violate(Rule::kStale, "no such event, or unknown flags");
      return kInvalidHandle;
    }
    return queue(
        call, stream,
        {.kind = Order::Kind::kWaitEvent, .event = event, .recorded = found->second.recorded});
  }

  static Result wait_value(const FakeCall& call, Stream stream, DevicePointer address,
                           uint64_t wanted, unsigned flags) {
    if (!call.fake.has(kStreamMemOps64)) {
      call.violate(Rule::kWord, "the device has no memory operations of 64 bits");
      return kNotSupported;
    }
    if (address % 8 != 0 || flags != 0 || !call.fake.pinned(address, 8)) {
      call.violate(Rule::kWord, absl::StrCat("at ", absl::Hex(address),
                                             ": not aligned, not registered, or unknown flags"));
      return kInvalidValue;
    }
    return queue(call, stream,
                 {.kind = Order::Kind::kWaitValue, .address = address, .value = wanted});
  }

  static Result flush_writes(const FakeCall& call, int target, int scope) {
    const auto options = call.fake.options_.attributes.find(kRdmaFlushWritesOptions);
    if (options == call.fake.options_.attributes.end() || (options->second & kFlushByHost) == 0) {
      call.violate(Rule::kCopy, "the device has no flush by the host");
      return kNotSupported;
    }
    if (target != kFlushCurrentContext || scope != kOrderedForOwner) {
      call.violate(Rule::kCopy, "unknown target or scope");
      return kInvalidValue;
    }
    if (call.fake.land_) call.fake.land_();
    return kSuccess;
  }
};

void add_fake_order_calls(FakeEntries& out) {
  add_call<FakeOrderCalls::flush_writes, "cuFlushGPUDirectRDMAWrites", kContext>(out, 11030);
  add_call<FakeOrderCalls::wait_event, "cuStreamWaitEvent", kContext>(out, 3020);
  add_call<FakeOrderCalls::wait_value, "cuStreamWaitValue64", kContext>(out, 11070);
}

}  // namespace baton::gpudirect

// The fake's streams and events: what is queued runs later, in an order that a seed decides.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/fake_driver.h"

namespace baton::gpudirect {

bool FakeDriver::run_one() {
  std::vector<std::deque<Operation>*> waiting;
  for (auto& [stream, queue] : streams_) {
    if (!queue.empty() && may_run(queue.front())) waiting.push_back(&queue);
  }
  if (waiting.empty()) return false;
  auto* next = waiting[random_() % waiting.size()];
  const auto engines = options_.attributes.find(kAsyncEngineCount);
  if (engines != options_.attributes.end() && engines->second == 1) {
    next = *std::min_element(waiting.begin(), waiting.end(), [](const auto* a, const auto* b) {
      return a->front().number < b->front().number;
    });
  }
  const Operation operation = next->front();
  next->pop_front();
  execute(operation);
  return true;
}

void FakeDriver::execute(const Operation& operation) {
  if (operation.event != nullptr) {
    if (const auto event = events_.find(operation.event); event != events_.end()) {
      ++event->second.happened;
    }
    return;
  }
  if (operation.launch != nullptr) return execute(*operation.launch);
  if (!operation.copies.empty()) return execute(operation.copies);
  if (operation.order.has_value()) return execute(*operation.order);
  const auto side = [&](DevicePointer at) {
    if (pinned(at, operation.bytes))
      return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(at));
    return view_of(at, operation.bytes);
  };
  std::byte* const to = side(operation.to);
  const std::byte* const from = side(operation.from);
  if (to == nullptr || from == nullptr) {
    violate("cuMemcpyAsync", "its memory went away before it ran");
    return;
  }
  std::memmove(to, from, operation.bytes);
}

void FakeDriver::run(size_t operations) {
  const std::lock_guard lock(mutex_);
  while (operations-- > 0 && !lost_ && run_one()) {
  }
}
void FakeDriver::run_all() { run(SIZE_MAX); }

size_t FakeDriver::queued() {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [stream, queue] : streams_) count += queue.size();
  return count;
}

size_t FakeDriver::largest_copy() {
  const std::lock_guard lock(mutex_);
  return largest_copy_;
}

struct FakeStreamCalls {
  using Needs = FakeCall::Needs;

  static Result create(Stream* stream, unsigned flags, int priority) {
    const FakeCall call("cuStreamCreateWithPriority", Needs::kContext, true);
    if (call.refused() != kSuccess) return call.refused();
    if (flags != kStreamNonBlocking || priority != 0) {
      call.violate("it waits for the legacy stream, or has a priority");
    }
    *stream = reinterpret_cast<Stream>(call.fake.next_object_++);
    call.fake.streams_[*stream];
    return kSuccess;
  }
  static Result destroy(Stream stream) {
    const FakeCall call("cuStreamDestroy", Needs::kContext);
    if (!call.takes_away()) return call.refused();
    const auto found = call.fake.streams_.find(stream);
    if (found == call.fake.streams_.end()) {
      call.violate("no such stream");
      return kInvalidHandle;
    }
    if (!found->second.empty()) call.violate("work is still queued on it");
    call.fake.streams_.erase(found);
    return call.told();
  }
  // Somebody looks: some of what is queued may have run by now.
  static void pass_time(const FakeCall& call) {
    for (uint64_t n = call.fake.random_() % 3; n > 0; --n) call.fake.run_one();
  }
  static Result query(Stream stream) {
    const FakeCall call("cuStreamQuery", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    const auto found = call.fake.streams_.find(stream);
    if (found == call.fake.streams_.end()) {
      call.violate("no such stream");
      return kInvalidHandle;
    }
    pass_time(call);
    return found->second.empty() ? kSuccess : kNotReady;
  }

  static Result copy(DevicePointer to, DevicePointer from, size_t bytes, Stream stream) {
    const FakeCall call("cuMemcpyAsync", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    const auto found = call.fake.streams_.find(stream);
    if (found == call.fake.streams_.end()) {
      call.violate(stream == nullptr ? "on the legacy stream" : "no such stream");
      return kInvalidHandle;
    }
    int on_device = 0;
    for (const DevicePointer at : {to, from}) {
      if (call.fake.view_of(at, bytes) != nullptr) {
        ++on_device;
      } else if (!call.fake.pinned(at, bytes)) {
        call.violate(absl::StrFormat(
            "[%#x, +%u) is neither accessible memory of a device, in one allocation, nor "
            "registered memory of the host",
            at, bytes));
        return kInvalidValue;
      }
    }
    if (bytes == 0 || on_device == 0) call.violate("no bytes, or none of a device");
    call.fake.largest_copy_ = std::max(call.fake.largest_copy_, bytes);
    found->second.push_back({call.fake.next_operation_++, to, from, bytes});
    return kSuccess;
  }

  static Result create_event(Event* event, unsigned flags) {
    const FakeCall call("cuEventCreate", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    if (flags != kEventDisableTiming) call.violate("an event that takes times slows its stream");
    *event = reinterpret_cast<Event>(call.fake.next_object_++);
    call.fake.events_[*event];
    return kSuccess;
  }
  static Result destroy_event(Event event) {
    const FakeCall call("cuEventDestroy", Needs::kContext);
    if (!call.takes_away()) return call.refused();
    if (call.fake.events_.erase(event) == 0) {
      call.violate("no such event");
      return kInvalidHandle;
    }
    return call.told();
  }
  static Result record(Event event, Stream stream) {
    const FakeCall call("cuEventRecord", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    const auto on = call.fake.streams_.find(stream);
    const auto found = call.fake.events_.find(event);
    if (on == call.fake.streams_.end() || found == call.fake.events_.end()) {
      call.violate("no such stream, or no such event");
      return kInvalidHandle;
    }
    ++found->second.recorded;
    on->second.push_back({.number = call.fake.next_operation_++, .event = event});
    return kSuccess;
  }
  static Result query_event(Event event) {
    const FakeCall call("cuEventQuery", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    const auto found = call.fake.events_.find(event);
    if (found == call.fake.events_.end()) {
      call.violate("no such event");
      return kInvalidHandle;
    }
    pass_time(call);
    return found->second.happened == found->second.recorded ? kSuccess : kNotReady;
  }
};

void add_fake_stream_calls(FakeEntries& out) {
  const auto add = [&](const char* name, auto* function, int version) {
    out[name] = {reinterpret_cast<void*>(function), version};
  };
  add("cuStreamCreateWithPriority", FakeStreamCalls::create, 5050);
  add("cuStreamDestroy", FakeStreamCalls::destroy, 4000);
  add("cuStreamQuery", FakeStreamCalls::query, 2000);
  add("cuMemcpyAsync", FakeStreamCalls::copy, 4000);
  add("cuEventCreate", FakeStreamCalls::create_event, 2000);
  add("cuEventDestroy", FakeStreamCalls::destroy_event, 4000);
  add("cuEventRecord", FakeStreamCalls::record, 2000);
  add("cuEventQuery", FakeStreamCalls::query_event, 2000);
}

}  // namespace baton::gpudirect

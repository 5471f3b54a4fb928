// The fake's streams and events: what is queued runs later, in an order that a seed decides.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/entries.h"

namespace baton::gpudirect {

constexpr size_t kStuckQuestions = 200'000;

bool FakeDriver::run_one() {
  std::vector<std::deque<Operation>*> waiting;
  for (auto& [stream, queue] : streams_) {
    if (!queue.empty() && may_run(queue.front())) waiting.push_back(&queue);
  }
  if (waiting.empty()) return false;
  auto* next = waiting[random_() % waiting.size()];
  // By some seeds streams starve: one runs only where none before it can.
  if (options_.seed % 4 == 3) next = options_.seed % 8 == 3 ? waiting.front() : waiting.back();
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
  std::byte* const to = reach(operation.to, operation.bytes);
  const std::byte* const from = reach(operation.from, operation.bytes);
  if (to == nullptr || from == nullptr) {
    violate(Rule::kLifetime, "cuMemcpyAsync", "its memory went away before it ran");
    return;
  }
  if (pinned(operation.to, 1) || pinned(operation.from, 1)) ++copies_with_host_;
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

std::string FakeDriver::heads() const {
  std::string out;
  for (const auto& [stream, queue] : streams_) {
    if (queue.empty()) continue;
    const Operation& first = queue.front();
    absl::StrAppendFormat(&out, "%sstream %p has %u to do, first ", out.empty() ? "" : "; ", stream,
                          queue.size());
    if (first.order.has_value() && first.order->kind == Order::Kind::kWaitValue) {
      absl::StrAppendFormat(&out, "a wait for %u at %#x", first.order->value, first.order->address);
    } else if (first.order.has_value() && first.order->kind == Order::Kind::kWaitEvent) {
      absl::StrAppendFormat(&out, "a wait for event %p", first.order->event);
    } else {
      out += first.event != nullptr ? "an event" : first.launch != nullptr ? "a launch" : "a copy";
    }
  }
  return out;
}

// Who asks on and on while nothing can run waits for what nobody will bring about: a test that says
// so is of more use than one that hangs.
void FakeDriver::look_for_hang(std::string_view call) {
  bool any = false;
  for (const auto& [stream, queue] : streams_) {
    if (queue.empty()) continue;
    any = true;
    if (may_run(queue.front())) {
      stuck_for_ = 0;
      return;
    }
  }
  if (any && ++stuck_for_ == kStuckQuestions) {
    violate(Rule::kWord, call, "asked again and again while nothing can run: " + heads());
  }
}

uint64_t FakeDriver::copies() {
  return calls_of("cuMemcpyAsync") + calls_of("cuMemcpy2DAsync") + calls_of("cuMemcpyBatchAsync") +
         calls_of("cuLaunchKernel");
}

size_t FakeDriver::largest_copy() {
  const std::lock_guard lock(mutex_);
  return largest_copy_;
}

uint64_t FakeDriver::copies_with_host() {
  const std::lock_guard lock(mutex_);
  return copies_with_host_;
}

struct FakeStreamCalls {
  static Result create(const FakeCall& call, Stream* stream, unsigned flags, int priority) {
    if (flags != kStreamNonBlocking || priority != 0) {
      call.violate(Rule::kCopy, "it waits for the legacy stream, or has a priority");
    }
    *stream = reinterpret_cast<Stream>(call.fake.next_object_++);
    call.fake.streams_[*stream];
    call.fake.homes_[*stream] = FakeDriver::current_context();
    return kSuccess;
  }
  static Result destroy(const FakeCall& call, Stream stream) {
    const auto found = call.fake.streams_.find(stream);
    if (found == call.fake.streams_.end()) {
      call.violate(Rule::kStale, "no such stream");
      return kInvalidHandle;
    }
    if (!found->second.empty()) {
      call.violate(Rule::kStale, "work is still queued on it: " + call.fake.heads());
    }
    if (call.fake.captures_.erase(stream) != 0) {
      call.violate(Rule::kCapture, "it is being recorded");
    }
    call.fake.streams_.erase(found);
    return kSuccess;
  }
  // Somebody looks: some of what is queued may have run by now.
  static void pass_time(const FakeCall& call) {
    for (uint64_t n = call.fake.random_() % 3; n > 0; --n) call.fake.run_one();
    call.fake.look_for_hang(call.name());
  }
  static Result query(const FakeCall& call, Stream stream) {
    const auto* const queue = call.queue(stream);
    if (queue == nullptr) return kInvalidHandle;
    pass_time(call);
    return queue->empty() ? kSuccess : kNotReady;
  }

  static Result copy(const FakeCall& call, DevicePointer to, DevicePointer from, size_t bytes,
                     Stream stream) {
    auto* const queue = call.queue(stream);
    if (queue == nullptr) return kInvalidHandle;
    int on_device = 0;
    for (const DevicePointer at : {to, from}) {
      if (call.fake.view_of(at, bytes) != nullptr) {
        ++on_device;
      } else if (!call.fake.pinned(at, bytes)) {
        call.violate(
            Rule::kCopy,
            absl::StrFormat(
                "[%#x, +%u) is neither accessible memory of a device, in one allocation, nor "
                "registered memory of the host",
                at, bytes));
        return kInvalidValue;
      }
    }
    if (bytes == 0 || on_device == 0) call.violate(Rule::kCopy, "no bytes, or none of a device");
    call.fake.largest_copy_ = std::max(call.fake.largest_copy_, bytes);
    if (to < from + bytes && from < to + bytes) {
      call.violate(Rule::kCopy, "it writes what it reads");
    }
    queue->push_back({call.fake.next_operation_++, to, from, bytes});
    return kSuccess;
  }

  static Result create_event(const FakeCall& call, Event* event, unsigned flags) {
    if (flags != kEventDisableTiming)
      call.violate(Rule::kCopy, "an event that takes times slows its stream");
    *event = reinterpret_cast<Event>(call.fake.next_object_++);
    call.fake.events_[*event];
    call.fake.homes_[*event] = FakeDriver::current_context();
    return kSuccess;
  }
  static Result destroy_event(const FakeCall& call, Event event) {
    if (call.fake.events_.erase(event) == 0) {
      call.violate(Rule::kStale, "no such event");
      return kInvalidHandle;
    }
    for (const auto& [stream, queue] : call.fake.streams_) {
      if (std::any_of(queue.begin(), queue.end(), [&](const auto& operation) {
            return operation.order.has_value() && operation.order->event == event;
          })) {
        call.violate(Rule::kStale, "a stream still waits for it");
      }
    }
    return kSuccess;
  }
  static Result record(const FakeCall& call, Event event, Stream stream) {
    if (const Result lost = call.loss_of(stream); lost != kSuccess) return lost;
    // Documented: an event and a stream are of one context.
    const auto home = call.fake.homes_.find(stream);
    if (FakeDriver::ForeignStreams::given() && home != call.fake.homes_.end() &&
        home->second != FakeDriver::current_context()) {
      return kInvalidHandle;
    }
    auto* const queue = call.queue(stream);
    const auto found = call.fake.events_.find(event);
    if (found == call.fake.events_.end()) call.violate(Rule::kStale, "no such event");
    if (queue == nullptr || found == call.fake.events_.end() || !call.at_home(event)) {
      return kInvalidHandle;
    }
    found->second.in_graph = call.fake.captures_.contains(stream);
    if (found->second.in_graph) return kSuccess;
    ++found->second.recorded;
    queue->push_back({.number = call.fake.next_operation_++, .event = event});
    return kSuccess;
  }
  static Result query_event(const FakeCall& call, Event event) {
    if (const Result lost = call.loss_of(event); lost != kSuccess) return lost;
    const auto found = call.fake.events_.find(event);
    if (found == call.fake.events_.end()) {
      call.violate(Rule::kStale, "no such event");
      return kInvalidHandle;
    }
    if (found->second.in_graph) return kCapturedEvent;
    pass_time(call);
    return found->second.happened == found->second.recorded ? kSuccess : kNotReady;
  }
};

void add_fake_stream_calls(FakeEntries& out) {
  add_call<FakeStreamCalls::create, "cuStreamCreateWithPriority", kContext | kBlocks>(out, 5050);
  add_call<FakeStreamCalls::destroy, "cuStreamDestroy", kContext | kTakes>(out, 4000);
  add_call<FakeStreamCalls::query, "cuStreamQuery", kContext>(out, 2000);
  add_call<FakeStreamCalls::copy, "cuMemcpyAsync", kContext>(out, 4000);
  add_call<FakeStreamCalls::create_event, "cuEventCreate", kContext>(out, 2000);
  add_call<FakeStreamCalls::destroy_event, "cuEventDestroy", kContext | kTakes>(out, 4000);
  add_call<FakeStreamCalls::record, "cuEventRecord", kContext>(out, 2000);
  add_call<FakeStreamCalls::query_event, "cuEventQuery", kContext>(out, 2000);
}

}  // namespace baton::gpudirect

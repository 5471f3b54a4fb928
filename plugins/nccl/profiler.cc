// The profiler door: what NCCL did when, as a timeline of Baton's (transport/timeline.h), which
// Perfetto shows.
//
// BATON_NCCL_TIMELINE=FILE: each process writes FILE.<rank>.json when a communicator is finalised.
// NCCL_PROFILE_EVENT_MASK, as for NCCL's own example: which kinds; otherwise collectives, sends and
// receives, and the proxy's operations. Without a file NCCL is asked for nothing and calls nothing.
#include <cctype>
#include <cstdlib>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plugins/nccl/abi_tools.h"
#include "plugins/nccl/plugin.h"
#include "transport/clock.h"
#include "transport/timeline.h"

namespace baton::nccl {
namespace profiling {
namespace {

constexpr uint64_t kUsual =
    kCollectiveEvent | kPointToPointEvent | kProxyOperationEvent | kCopyEngineEvent;
constexpr uint64_t kKnown = kUsual | kGroupEvent | kProxyStepEvent;

// One per process, whatever communicators it has. It is never freed: proxies may still stop events
// when the last communicator is gone.
struct Recorded {
  std::mutex mutex;
  std::string path;
  std::unique_ptr<Timeline> timeline;
};
Recorded& recorded() {
  static auto* const all = new Recorded;
  return *all;
}

// A context is a number, for the spans' `request`; an event is a span that has not ended.
struct Context {
  uint64_t communicator;
};
struct Event {
  Span span;
};

// "ncclFloat16" has 2 bytes: the first number in it, in bits.
uint64_t bytes_of(const char* type) {
  while (type != nullptr && *type != 0 && std::isdigit(static_cast<unsigned char>(*type)) == 0) {
    ++type;
  }
  return type == nullptr ? 0 : std::strtoull(type, nullptr, 10) / 8;
}
const char* text(const char* given) { return given == nullptr ? "?" : given; }

// Literals: a timeline keeps no copy of a track's name.
Span describe(const ProfiledEvent& event) {
  switch (event.kind) {
    case kCollectiveEvent: {
      const auto& call = event.collective;
      return {
          .track = "NCCL collectives",
          .name = absl::StrFormat("%s %u, %s/%s, %u channels", text(call.function), call.sequence,
                                  text(call.algorithm), text(call.protocol), call.channels),
          .bytes = call.count * bytes_of(call.type)};
    }
    case kCopyEngineEvent:
      return {.track = "NCCL copy engines",
              .name = absl::StrFormat("%s %u", text(event.collective.function),
                                      event.collective.sequence),
              .bytes = event.collective.count * bytes_of(event.collective.type)};
    case kPointToPointEvent: {
      const auto& call = event.point_to_point;
      return {.track = "NCCL sends and receives",
              .name = absl::StrFormat("%s, peer %d", text(call.function), call.peer),
              .bytes = call.count * bytes_of(call.type)};
    }
    case kProxyOperationEvent: {
      const auto& call = event.operation;
      return {.track = call.sends != 0 ? "NCCL proxy sends" : "NCCL proxy receives",
              .name = absl::StrFormat("peer %d, channel %u, %d steps", call.peer, call.channel,
                                      call.steps)};
    }
    case kProxyStepEvent:
      return {.track = "NCCL proxy steps", .name = absl::StrCat("step ", event.step)};
    default:
      return {.track = "NCCL groups", .name = "group"};
  }
}

Result init(void** context, uint64_t communicator, int* wanted, const char*, int, int, int rank,
            Logger log) {
  Plugin::get().set_logger(log);
  if (context == nullptr || wanted == nullptr) return Result::kInvalidArgument;
  *context = new Context{communicator};
  *wanted = 0;
  const char* const path = std::getenv("BATON_NCCL_TIMELINE");
  if (path == nullptr || *path == 0) return Result::kSuccess;
  const char* const mask = std::getenv("NCCL_PROFILE_EVENT_MASK");
  *wanted = static_cast<int>(mask == nullptr ? kUsual : std::strtoull(mask, nullptr, 0) & kKnown);
  Recorded& all = recorded();
  std::lock_guard lock(all.mutex);
  if (all.timeline != nullptr) return Result::kSuccess;
  all.path = absl::StrFormat("%s.%d.json", path, rank);
  all.timeline = std::make_unique<Timeline>(absl::StrCat("NCCL rank ", rank));
  Plugin::get().say(LogLevel::kInfo, absl::StrCat("profiler: a timeline in ", all.path));
  return Result::kSuccess;
}

Result start(void* context, void** event, ProfiledEvent* description) {
  if (event == nullptr) return Result::kInvalidArgument;
  *event = nullptr;
  if (context == nullptr || description == nullptr || recorded().timeline == nullptr ||
      (description->kind & kKnown) == 0) {
    return Result::kSuccess;
  }
  auto made = std::make_unique<Event>();
  made->span = describe(*description);
  made->span.request = static_cast<Context*>(context)->communicator;
  made->span.begin = Clock::steady().now();
  *event = made.release();
  return Result::kSuccess;
}

// NCCL stops, and tells of, events that it was given none for.
Result stop(void* event) {
  if (event == nullptr) return Result::kSuccess;
  const std::unique_ptr<Event> over(static_cast<Event*>(event));
  over->span.end = Clock::steady().now();
  recorded().timeline->add(std::move(over->span));
  return Result::kSuccess;
}

Result record(void* event, int state, ProfiledState* arguments) {
  if (event == nullptr || arguments == nullptr) return Result::kSuccess;
  if (state == kSendWaits || state == kReceiveWaits) {
    static_cast<Event*>(event)->span.bytes = arguments->step_bytes;
  }
  return Result::kSuccess;
}

Result finalize(void* context) {
  delete static_cast<Context*>(context);
  Recorded& all = recorded();
  std::lock_guard lock(all.mutex);
  if (all.timeline == nullptr) return Result::kSuccess;
  const absl::Status status = all.timeline->write(all.path);
  return status.ok() ? Result::kSuccess : fail("profiler", status);
}

constexpr Profiler kProfiler{"Baton", init, start, stop, record, finalize};

}  // namespace
}  // namespace profiling

#define BATON_NCCL_PROFILER extern "C" __attribute__((visibility("default")))
BATON_NCCL_PROFILER const Profiler ncclProfiler_v5 = profiling::kProfiler;
BATON_NCCL_PROFILER const Profiler ncclProfiler_v6 = profiling::kProfiler;
BATON_NCCL_PROFILER const Profiler ncclProfiler_v7 = profiling::kProfiler;
#undef BATON_NCCL_PROFILER

}  // namespace baton::nccl

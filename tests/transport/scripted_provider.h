// A provider whose connections a test makes, feeds and loses by hand, to see what the worker does.
#pragma once

#include "tests/std.h"
#include "transport/internal/tables/rail_extras.h"
#include "transport/worker.h"

namespace baton {

class ScriptedProvider;

// Takes every slice and reports it only when the test says so.
class ScriptedRail final : public Rail, public internal::CountingRail {
 public:
  ScriptedRail(ScriptedProvider& provider, const std::string& name, size_t slice_bytes)
      : provider_(provider),
        properties_{.provider = name, .route = name, .slice_bytes = slice_bytes} {}
  const Properties& properties() const override { return properties_; }
  absl::Status reaches(const RemoteRegion& region) const override;
  bool post(const Slice& slice, EventSink&) override {
    if (held.size() == properties_.depth) return false;
    held.push_back(slice);
    return true;
  }
  void abort(TransferId transfer, EventSink& sink) override;
  void close(absl::Status why, EventSink& sink) override;

  // Reports all that it holds, as done or as `status`.
  void report(const absl::Status& status = absl::OkStatus());
  void lose(const std::string& why);

  std::optional<internal::Ordinal> counted() const override { return count; }

  std::vector<Slice> held;
  std::optional<internal::Ordinal> count;  // of messages that have no name but their number

 private:
  ScriptedProvider& provider_;
  Properties properties_;
};

class ScriptedProvider final : public Provider {
 public:
  explicit ScriptedProvider(std::string name = "scripted", int rank = 0)
      : capabilities_{.name = std::move(name), .rank = rank, .available = true} {}

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return "here"; }
  absl::Status reachable(const std::string&, std::string_view) const override {
    return absl::OkStatus();
  }
  void connect(const ConnectRequest& request) override { calls.push_back(request); }
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  absl::Status remove_region(const RegionEntry&, EventSink&) override { return absl::OkStatus(); }
  bool progress(EventSink& worker) override {
    sink = &worker;
    for (auto& [who, rail] : std::exchange(callers_, {})) worker.accepted(who, std::move(rail));
    if (const auto next = std::exchange(then, nullptr)) next();
    return false;
  }
  int wait_fd() const override { return -1; }
  bool arm() override { return true; }

  // In the next progress() the worker hears of a peer that called. The worker owns the rail.
  ScriptedRail& call_in(const HelloInfo& who) {
    auto rail = std::make_unique<ScriptedRail>(*this, capabilities_.name, slice_bytes);
    ScriptedRail& made = *rail;
    closed_.erase(&made);
    callers_.emplace_back(who, std::move(rail));
    return made;
  }
  // The first of `calls` is answered: its rail, or null where the worker has dropped it at once.
  ScriptedRail* answer(const HelloInfo& who) {
    const uint64_t session = calls.front().session;
    calls.erase(calls.begin());
    auto rail = std::make_unique<ScriptedRail>(*this, capabilities_.name, slice_bytes);
    ScriptedRail* made = rail.get();
    closed_.erase(made);
    closed = nullptr;
    sink->connected(session, who, std::move(rail));
    return closed == made ? nullptr : made;
  }

  // The first of `calls` fails.
  void fail(const absl::Status& why) {
    const uint64_t session = calls.front().session;
    calls.erase(calls.begin());
    sink->connect_failed(session, why);
  }

  // Whether the worker has closed it, and so may have destroyed it.
  bool is_closed(const Rail* rail) const { return closed_.contains(rail); }
  void note_closed(const Rail* rail, absl::Status why) {
    closed = rail;
    closed_why = std::move(why);
    closed_.insert(rail);
  }

  EventSink* sink = nullptr;          // the worker, from its first progress() on
  std::vector<ConnectRequest> calls;  // that the worker has made
  std::function<void()> then;         // at the end of the next progress()
  const Rail* closed = nullptr;       // the last that the worker has closed
  absl::Status closed_why;
  size_t slice_bytes = SIZE_MAX;  // of rails that are made from now on
  std::set<uint32_t> unreached;   // indices of regions

 private:
  std::vector<std::pair<HelloInfo, std::unique_ptr<Rail>>> callers_;
  std::set<const Rail*> closed_;
  const Capabilities capabilities_;
};

inline absl::Status ScriptedRail::reaches(const RemoteRegion& region) const {
  if (!provider_.unreached.contains(region.index)) return absl::OkStatus();
  return absl::FailedPreconditionError(properties_.provider + " does not get there");
}
inline void ScriptedRail::report(const absl::Status& status) {
  for (const Slice& slice : std::exchange(held, {})) {
    provider_.sink->slice_done(*this, slice.transfer->id, slice.index, status);
  }
}
inline void ScriptedRail::lose(const std::string& why) {
  report(absl::UnknownError(why));
  provider_.sink->rail_down(*this, absl::UnavailableError(why));
}
inline void ScriptedRail::abort(TransferId, EventSink&) {}
inline void ScriptedRail::close(absl::Status why, EventSink& sink) {
  provider_.note_closed(this, why);
  report(absl::UnknownError(why.message()));
  sink.rail_down(*this, std::move(why));
}

}  // namespace baton

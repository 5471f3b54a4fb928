// Beginning a call: checks, the vote that may have to go before it, its start.
#include "collectives/internal/call_starter.h"

#include <sched.h>

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {

prediction::CallShape CallStarter::shape_of(const Request& request) const {
  const Collective what = request.collective;
  const bool blocks = what == Collective::kReduceScatter || what == Collective::kAllGather ||
                      what == Collective::kAllToAll || what == Collective::kGather ||
                      what == Collective::kScatter;
  prediction::CallShape shape;
  shape.collective = what;
  shape.ranks = needs_.mesh.ranks();
  shape.root = static_cast<uint32_t>(request.root);
  shape.element_bytes = size_of(request.type);
  shape.bytes = request.count * shape.element_bytes * (blocks ? needs_.mesh.ranks() : 1);
  shape.uneven = request.uneven;
  if (shape.uneven) {
    // Every call may have other lengths: those of about the same longest block are run alike.
    const auto longest =
        *std::max_element(request.blocks.counts.begin(), request.blocks.counts.end());
    shape.bytes = longest == 0
                      ? 0
                      : std::bit_ceil(longest) * shape.element_bytes * size_t{needs_.mesh.ranks()};
  }
  shape.ordered = request.reduces() && request.options->ordered.value_or(needs_.options.ordered);
  return shape;
}

CallStarter::Kind CallStarter::kind_of(const Request& request) {
  // A factor may be missing, and lists of blocks are compared by none of this.
  if (request.uneven || request.op == ReduceOp::kPreMulSum) return {};
  const CallOptions& options = *request.options;
  return {request.count, options.chunk_bytes, options.channels,  request.root,   request.collective,
          request.type,  request.op,          options.algorithm, options.ordered};
}

absl::Status CallStarter::usable(const CallOptions& options) const {
  absl::Status status = needs_.mesh.endpoint().usable();
  if (options.after.device >= 0) status.Update(needs_.calls.prepare(options.after));
  if (options.release.device >= 0) status.Update(needs_.calls.prepare(options.release));
  return status;
}

absl::StatusOr<Work> CallStarter::begin(const Request& request) {
  if (absl::Status status = usable(*request.options); !status.ok()) return status;
  Lock lock(needs_.mutex);
  return begin(request, lock);
}

absl::Status CallStarter::run(const Request& request) {
  if (absl::Status status = check_waited_for(request.collective, *request.options); !status.ok()) {
    return status;
  }
  if (absl::Status status = usable(*request.options); !status.ok()) return status;
  absl::StatusOr<Work> work;
  {
    Lock lock(needs_.mutex);
    work = begin(request, lock);
    if (!work.ok()) return work.status();
    // A short call is over before it pays to let go of the lock.
    if (auto result = needs_.driver.run_short(*work)) return *std::move(result);
  }
  return needs_.driver.wait(*work);
}

absl::StatusOr<Work> CallStarter::begin(const Request& asked, Lock& lock) {
  await_turn(lock);
  bool in_place = false;
  const Kind kind = kind_of(asked);
  const bool known = kind.count != Kind().count && kind == last_ && needs_.tuner.last() != nullptr;
  Extents extents = last_extents_;
  absl::Status status =
      check_request(asked, needs_.mesh.rank(), needs_.mesh.ranks(), in_place, extents, known);
  if (!status.ok()) return status;
  if (!known) {
    last_ = {};  // until it has been looked up
    last_extents_ = extents;
  }
  if (const absl::Status& broken = needs_.failure.begin_call(); !broken.ok()) return broken;
  if (status = needs_.calls.room_for(1); !status.ok()) return status;
  DeviceCalls::StagedPtr staged;
  const bool own_input = DeviceCalls::wants_own_input(asked, needs_.mesh.ranks());
  const bool concerned = needs_.devices.concerns(asked, extents);
  if (!concerned && !own_input) {
    return choose(asked, in_place, std::move(staged), false, lock,
                  known ? needs_.tuner.last() : nullptr);
  }
  Request request = asked;
  const bool on_device =
      concerned && needs_.devices.may_exchange(request) && needs_.devices.can_exchange(request);
  if (concerned && !on_device) {
    auto copied =
        fetch(needs_.devices.stage(request, in_place), request.collective, *request.options, lock);
    if (!copied.ok()) return copied.status();
    staged = *std::move(copied);
  }
  const bool gated = request.options->after.device >= 0;
  if (own_input && gated && !DeviceCalls::reads(staged)) {
    return refuse(
        request.collective,
        "the host's memory is made into another input when the call begins, and so cannot "
        "wait for a stream: synchronise that, and leave out `after`");
  }
  if (own_input && !gated) {
    status = needs_.devices.own_input(request, staged, in_place);
    if (!status.ok()) return end_with(request.collective, status);
  }
  return choose(request, in_place, std::move(staged), on_device, lock);
}

absl::StatusOr<Work> CallStarter::choose(const Request& request, bool in_place,
                                         DeviceCalls::StagedPtr staged, bool on_device, Lock& lock,
                                         Tuner::Entry* entry) {
  if (entry == nullptr) {
    const absl::StatusOr<Tuner::Entry*> found =
        needs_.tuner.entry_of(shape_of(request), {.algorithm = request.options->algorithm,
                                                  .channels = request.options->channels,
                                                  .chunk_bytes = request.options->chunk_bytes});
    if (!found.ok()) return found.status();
    entry = *found;
    last_ = kind_of(request);
  }
  absl::Status status;
  if (const Tuner::Due due = needs_.tuner.due(*entry); due == Tuner::Due::kVote) {
    status = prepare_vote(*entry);
  } else if (due == Tuner::Due::kAwait) {
    status = await_vote(*entry, lock);
  }
  if (!status.ok()) return status;
  return start(request, *entry, in_place, std::move(staged), on_device);
}

absl::StatusOr<DeviceCalls::StagedPtr> CallStarter::fetch(
    absl::StatusOr<DeviceCalls::StagedPtr> staged, Collective what, const CallOptions& options,
    Lock& lock) {
  if (staged.ok() && *staged == nullptr) return staged;
  if (absl::IsInvalidArgument(staged.status())) {
    return refuse(what, std::string(staged.status().message()));
  }
  absl::Status status = staged.status();
  if (status.ok() && options.after.device >= 0) {
    needs_.devices.begin_copy_in(**staged);
  } else if (status.ok()) {
    const Time timeout = options.timeout == Time::zero() ? needs_.options.timeout : options.timeout;
    const Time deadline = base::deadline_after(needs_.mesh.now(), timeout);
    ++beginning_;
    status = needs_.devices.copy_in(**staged, deadline, [&] {
      lock.unlock();
      sched_yield();
      lock.lock();
      return needs_.failure.broken();
    });
    --beginning_;
    turn_over_.notify_all();
  }
  if (status.ok()) return staged;
  return end_with(what, status);
}

// The others are in the call, or will be.
absl::Status CallStarter::end_with(Collective what, const absl::Status& why) {
  needs_.failure.fail(
      absl::Status(why.code(), absl::StrCat(std::string(name_of(what)), ": ", why.message())),
      needs_.mesh.rank());
  return needs_.failure.broken();
}

absl::StatusOr<Work> CallStarter::start(const Request& request, Tuner::Entry& entry, bool in_place,
                                        DeviceCalls::StagedPtr staged, bool on_device) {
  // A call that is refused must not count in the tuner: other ranks may have had room for it.
  if (absl::Status status = needs_.calls.room_for(1); !status.ok()) return status;
  if (absl::Status status = needs_.calls.note(*request.options); !status.ok()) return status;
  absl::StatusOr<Tuner::Pick> pick = needs_.tuner.take(entry, in_place);
  if (!pick.ok()) needs_.calls.drop();
  if (!pick.ok()) return pick.status();
  absl::StatusOr<Work> work =
      needs_.calls.start(request, *pick, std::move(staged), on_device, in_place);
  if (!work.ok()) return work;
  if (needs_.devices.may_exchange(request)) needs_.mesh.wake_all();
  if (needs_.mesh.any_transfer()) needs_.failure.compare_last_call();
  needs_.driver.call_started();
  return work;
}

// The vote is a call like any other, right before the one that begins.
absl::Status CallStarter::prepare_vote(Tuner::Entry& entry) {
  if (absl::Status status = needs_.calls.room_for(2); !status.ok()) return status;
  std::vector<double>& votes = needs_.tuner.votes(entry);
  CallOptions plain;
  plain.algorithm = Algorithm::kRecursiveDoubling;
  plain.ordered = false;
  const Request request{Collective::kAllReduce,
                        votes.data(),
                        votes.data(),
                        votes.size(),
                        DataType::kF64,
                        ReduceOp::kMax,
                        0,
                        &plain};
  last_ = Kind{};
  absl::StatusOr<Tuner::Entry*> own =
      needs_.tuner.entry_of(shape_of(request), {.algorithm = Algorithm::kRecursiveDoubling});
  absl::StatusOr<Work> work =
      own.ok() ? start(request, **own, true) : absl::StatusOr<Work>(own.status());
  needs_.tuner.vote_began(entry, work.ok() ? *work : Work{});
  return work.status();
}

// Without the lock: others may abort() meanwhile, but none may begin a call before this one. So no
// callback runs here: it may begin one.
absl::Status CallStarter::await_vote(Tuner::Entry& entry, Lock& lock) {
  const Work vote = needs_.tuner.vote_of(entry);
  ++beginning_;
  lock.unlock();
  absl::Status status = needs_.driver.wait_without_callbacks(vote);
  lock.lock();
  --beginning_;
  turn_over_.notify_all();
  if (status.ok()) needs_.tuner.vote_ended(entry);
  return status;
}

absl::StatusOr<Work> CallStarter::begin_point_to_point(bool sends, void* data, size_t count,
                                                       DataType type, int other,
                                                       const CallOptions& call_options) {
  if (absl::Status status = usable(call_options); !status.ok()) return status;
  Lock lock(needs_.mutex);
  absl::Status status = check_point_to_point(sends, data, count, type, other, needs_.mesh.rank(),
                                             needs_.mesh.ranks());
  if (!status.ok()) return status;
  if (absl::Status broken = needs_.failure.begin_call(); !broken.ok()) return broken;
  auto staged = fetch(needs_.devices.stage_point_to_point(sends, data, count * size_of(type)),
                      Collective::kSendReceive, call_options, lock);
  if (!staged.ok()) return staged.status();
  auto work = needs_.calls.start_point_to_point(sends, data, count, type, other, call_options,
                                                *std::move(staged));
  if (work.ok()) needs_.driver.call_started();
  return work;
}

absl::StatusOr<Work> CallStarter::begin_all_to_all_v(const void* in, const Blocks& send, void* out,
                                                     const Blocks& receive, DataType type,
                                                     const CallOptions& call_options) {
  if (absl::Status status = usable(call_options); !status.ok()) return status;
  Lock lock(needs_.mutex);
  await_turn(lock);
  absl::Status status =
      check_all_to_all_v(in, send, out, receive, type, needs_.mesh.rank(), needs_.mesh.ranks());
  if (!status.ok()) return status;
  if (absl::Status broken = needs_.failure.begin_call(); !broken.ok()) return broken;
  auto staged = fetch(needs_.devices.stage_blocks(in, send, out, receive, size_of(type)),
                      Collective::kAllToAll, call_options, lock);
  if (!staged.ok()) return staged.status();
  auto work = needs_.calls.start_all_to_all_v(static_cast<const std::byte*>(in), send,
                                              static_cast<std::byte*>(out), receive, type,
                                              call_options, *std::move(staged));
  if (!work.ok()) return work;
  if (needs_.mesh.any_transfer()) needs_.failure.compare_last_call();
  needs_.driver.call_started();
  return work;
}

}  // namespace baton::collectives::internal

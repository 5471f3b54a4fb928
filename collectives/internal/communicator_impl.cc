// Wiring the parts of a communicator together.
#include "collectives/internal/communicator_impl.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_format.h"
#include "collectives/internal/calibrate.h"
#include "transport/base/durations.h"
#include "transport/base/splitmix.h"

namespace baton {

namespace collectives::internal {

CommunicatorOptions options_of(GroupOptions options) {
  CommunicatorOptions out;
  out.name = std::move(options.name);
  out.start_timeout = options.start_timeout;
  out.timeout = options.timeout;
  out.ordered = options.ordered;
  out.tune = options.tune;
  out.slot_bytes = options.slot_bytes;
  out.mask_lost = options.mask_lost;
  return out;
}

}  // namespace collectives::internal

using collectives::internal::CallStarter;
using collectives::internal::CallTable;
using collectives::internal::ControlMessage;
using collectives::internal::DeviceCalls;
using collectives::internal::Driver;
using collectives::internal::EndpointImpl;
using collectives::internal::Mesh;
using collectives::internal::Tuner;
using collectives::internal::Windows;
using collectives::prediction::CostParameters;

namespace {

// Its value was checked when the worker was made. Of equal names the first counts.
DeviceCalls::Sums sums_wanted(const SettingValues& settings) {
  for (const auto& [name, value] : settings) {
    if (name != "staging.sums") continue;
    if (value == "cpus") return DeviceCalls::Sums::kCpus;
    return value == "kernel" ? DeviceCalls::Sums::kKernel : DeviceCalls::Sums::kAuto;
  }
  return DeviceCalls::Sums::kAuto;
}

// How long the end of a communicator waits for others to let go of what was sent.
// For messages of calls that have ended to reach ranks that are slow, before a reconfigure().
constexpr Time kMostSettling = std::chrono::seconds(1);
// For the last words of a start to go out, beside what other groups may transfer for longer.
constexpr Time kTelling = std::chrono::milliseconds(100);
constexpr Time kMostEnding = std::chrono::milliseconds(50);

// All slots of a rank together stay below this, were all its links used.
constexpr size_t kSlotBudget = size_t{512} << 20;
constexpr size_t kLeastSlot = 64 << 10;

// Equal at all ranks.
size_t slot_bytes_for(size_t ranks, size_t wanted) {
  using collectives::executor::TransferLink;
  const size_t slots = TransferLink::kSlots * collectives::executor::kLanes;
  while (wanted > kLeastSlot && wanted > kSlotBudget / slots / std::max<size_t>(ranks - 1, 1)) {
    wanted = std::max(kLeastSlot, wanted / 2 / 4096 * 4096);
  }
  return wanted;
}

// Ids of groups that come from others: equal at all ranks, unlike any other.
class Uuid {
 public:
  explicit Uuid(uint64_t from) { add(from); }
  Uuid& add(uint64_t value) {
    hash_ = base::splitmix(hash_ ^ base::splitmix_hash(value));
    return *this;
  }
  Uuid& add(std::string_view text) {
    for (const char byte : text) add(static_cast<unsigned char>(byte));
    return *this;
  }
  uint64_t value() const { return hash_ != 0 ? hash_ : 1; }

 private:
  uint64_t hash_ = 0;
};

}  // namespace

Communicator::Impl::Impl(CommunicatorOptions communicator_options,
                         std::shared_ptr<Endpoint> of_endpoint, EndpointImpl& of_core)
    : options(std::move(communicator_options)),
      endpoint(std::move(of_endpoint)),
      core(of_core),
      mutex(core.mutex()),
      mesh(core, options, *this),
      failure(options, mesh, recorder),
      survivors(options, mesh, failure) {}

void Communicator::Impl::leave(bool in_own_callback) {
  {
    Lock lock(mutex);
    if (calls->any_in_flight()) {
      failure.fail(absl::AbortedError(absl::StrFormat(
                       "rank %u has destroyed its communicator with calls in flight", mesh.rank())),
                   mesh.rank());
    }
  }
  // By the machine's clock: a test's may stand still.
  const Time end = Clock::steady().now() + kMostEnding;
  Lock lock(mutex);
  while (failure.ending() && Clock::steady().now() < end) {
    const uint64_t ticket = core.nap_ticket();
    const bool moved = core.tick();
    failure.end_calls();
    lock.unlock();
    if (!moved) core.nap(std::chrono::milliseconds(1), ticket);
    lock.lock();
  }
  failure.end_calls(true);
  reconfiguring.reset();
  calls->end_plain(entering_, absl::AbortedError("the communicator was destroyed"));
  lock.unlock();
  core.run_callbacks();
  lock.lock();
  if (!in_own_callback) {
    calls->ended().wait(lock, [this] { return calls->callbacks_due() == 0; });
  }
  devices->stop();
  while (!windows->close_all(absl::AbortedError("its communicator was destroyed"))) {
    lock.unlock();
    Windows::pause_closing();
    lock.lock();
  }
  mesh.leave(failure.broken().ok() ? &lock : nullptr);
}

void Communicator::Impl::keep(std::unique_ptr<Impl> impl) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::unique_ptr<Impl>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(impl));
}

Communicator::Impl::~Impl() {
  if (calls == nullptr) return;
  leave(false);
  Lock lock(mutex);
  devices.reset();
  executor.reset();
}

absl::Status Communicator::Impl::start(absl::Span<const Handle> handles, uint64_t uuid, bool eager,
                                       const CostParameters* cost) {
  Lock lock(mutex);
  uint32_t own = 0;
  if (absl::Status status = mesh.check(handles, uuid, own); !status.ok()) return status;
  return enter(handles, uuid, own, eager, options.start_timeout, cost);
}

absl::Status Communicator::Impl::enter(absl::Span<const Handle> handles, uint64_t uuid,
                                       uint32_t own, bool eager, Time start_timeout,
                                       const CostParameters* known) {
  if (wanted_slot_bytes_ == 0) wanted_slot_bytes_ = options.slot_bytes;
  options.slot_bytes = slot_bytes_for(handles.size(), wanted_slot_bytes_);
  if (absl::Status status = mesh.enter(handles, uuid, own, *this, eager, start_timeout);
      !status.ok()) {
    return status;
  }
  rank = static_cast<int>(own);
  ranks = static_cast<int>(handles.size());
  recorder.set_rank(own);
  if (calls != nullptr) calls->begin_group(own, mesh.ranks(), mesh.control());
  executor.emplace(own, mesh.links(), &mesh.memory(), core.clock(), &recorder);
  CostParameters cost = known != nullptr ? *known : CostParameters();
  cost.node_size = mesh.node_size();
  cost.cores_move_local = true;
  // With more ranks than cores, a short call in shared memory is over when the kernel lets it be.
  const bool at_the_kernels_mercy = mesh.crowded() && mesh.expects_direct();
  tuner.emplace(
      Tuner::Settings{own, mesh.ranks(), options.slot_bytes, options.tune, at_the_kernels_mercy},
      cost);
  devices.emplace(mesh, sums_wanted(core.options().worker.settings));
  survivors.begin();
  if (calls == nullptr) {
    calls = std::make_unique<CallTable>(CallTable::Needs{options, own, mesh.ranks(), core.clock(),
                                                         mesh.control(), *tuner, *executor,
                                                         recorder, &*devices, &core, this});
    const Windows::Needs needs{options, mesh, *calls, failure};
    windows = std::make_unique<Windows>(needs);
    driver = std::make_unique<Driver>(Driver::Needs{needs, mutex, *executor, *windows}, this);
    starter =
        std::make_unique<CallStarter>(CallStarter::Needs{needs, mutex, *tuner, *driver, *devices});
  }
  failure.watch(*executor, *calls);
  mesh.want_first();
  core.deliver_kept(uuid);
  return absl::OkStatus();
}

absl::Status Communicator::Impl::calibrate() {
  const Time started = mesh.now();
  const auto cost = collectives::internal::measure_costs(mesh, *starter, *driver,
                                                         options.slot_bytes, tuner->parameters());
  if (!cost.ok()) return cost.status();
  tuner->set_parameters(cost->parameters, mesh.now() - started);
  executor->set_stream_over_read(cost->stream_over_read);
  return absl::OkStatus();
}

void Communicator::Impl::on_control_message(uint32_t from, ControlMessage kind,
                                            std::string_view body) {
  if (kind == ControlMessage::kBallot) {
    survivors.on_ballot(from, body);
  } else if (kind == ControlMessage::kAdd) {
    if (absl::Status status = windows->on_add(body); !status.ok()) failure.fail(status, from);
  } else {
    failure.on_control_message(from, kind, body);
  }
}

void Communicator::Impl::on_down(uint32_t from, const absl::Status& why) {
  failure.on_down(from, why);
}

void Communicator::Impl::on_wrong(const absl::Status& why, uint32_t culprit) {
  failure.fail(why, culprit);
}

void Communicator::Impl::on_link(uint32_t to, collectives::executor::Link& link) {
  executor->set_link(to, &link);
}

void Communicator::Impl::look(Time now) {
  mesh.look(now);
  failure.end_calls();
  if (reconfiguring.has_value()) {
    if (failure.broken().ok() && (!mesh.unsettled() || now >= reconfiguring->settle_by))
      end_group();
    if (!failure.broken().ok() && !failure.ending() && !starter->beginning() &&
        windows->close_all(absl::AbortedError("reconfigure() has ended its group"))) {
      enter_next();
    }
  }
  if (entering_.sequence != 0 && !reconfiguring.has_value() && !mesh.starting() &&
      failure.broken().ok()) {
    calls->end_plain(std::exchange(entering_, Work{}), absl::OkStatus());
  }
  failure.look(now);
}

absl::Status Communicator::Impl::wait_ready(Time timeout) {
  absl::Status status;
  const bool over = driver->wait_until(
      [&] {
        status = failure.broken();
        return !reconfiguring.has_value() && (!status.ok() || !mesh.starting());
      },
      timeout);
  if (over && status.ok()) {
    // The others wait for our word, and the caller may now compute for a while.
    driver->wait_until([&] { return mesh.worker().stats().open_transfers == 0; },
                       std::min(timeout, kTelling));
  }
  if (over) return status;
  return absl::DeadlineExceededError(
      absl::StrFormat("the group \"%s\" is not ready after %.3f s: wait again, or abort() it",
                      options.name, std::chrono::duration<double>(timeout).count()));
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::make(
    absl::Span<const Handle> members, uint64_t uuid, CommunicatorOptions own, bool ready) {
  CostParameters cost;
  {
    Lock lock(mutex);
    cost = tuner->parameters();
  }
  const Time start_timeout = own.start_timeout;
  auto impl = std::make_unique<Impl>(std::move(own), endpoint, core);
  absl::Status status = impl->start(members, uuid, ready, &cost);
  if (status.ok() && ready) status = impl->wait_ready(start_timeout);
  if (!status.ok()) return status;
  return std::unique_ptr<Communicator>(new Communicator(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::split(int color, int key,
                                                                        GroupOptions of_group) {
  Splitting split;
  const absl::StatusOr<Work> work = begin_split(color, key, split);
  if (!work.ok()) return work.status();
  if (absl::Status status = driver->wait(*work); !status.ok()) return status;
  return finish_split(split, std::move(of_group));
}

absl::StatusOr<Work> Communicator::Impl::begin_split(int color, int key, Splitting& split) {
  if (absl::Status status = core.usable(); !status.ok()) return status;
  Lock lock(mutex);
  starter->await_turn(lock);
  // Another thread's reconfigure() may change the group from here on.
  split.handles = mesh.handles();
  split.mine = {color, key};
  split.all.resize(split.handles.size());
  CallOptions plain;
  // Recursive doubling uses only connected links, and its cost is not compared with that of longer
  // programs.
  plain.algorithm = Algorithm::kRecursiveDoubling;
  absl::StatusOr<Work> work =
      starter->begin({Collective::kAllGather, split.mine.data(), split.all.data(),
                      sizeof split.mine, DataType::kU8, ReduceOp::kSum, 0, &plain},
                     lock);
  if (!work.ok()) return work;
  split.uuid =
      Uuid(mesh.id()).add("split").add(++splits_).add(static_cast<uint32_t>(color)).value();
  return work;
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::finish_split(
    const Splitting& split, GroupOptions of_group) {
  const auto& all = split.all;
  if (split.mine[0] < 0) return nullptr;
  std::vector<size_t> order;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r][0] == split.mine[0]) order.push_back(r);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return all[a][1] < all[b][1]; });
  std::vector<Handle> members;
  for (const size_t member : order) members.push_back(split.handles[member]);
  return make(members, split.uuid, collectives::internal::options_of(std::move(of_group)));
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::subgroup(
    absl::Span<const int> members, GroupOptions of_group) {
  if (absl::Status status = core.usable(); !status.ok()) return status;
  uint64_t uuid = 0;
  std::vector<Handle> chosen;
  {
    Lock lock(mutex);
    const auto ours = static_cast<int>(mesh.ranks());
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] < 0 || members[i] >= ours) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "subgroup: there is no rank %d: this group has ranks 0 to %d", members[i], ours - 1));
      }
      if (std::find(members.begin(), members.begin() + static_cast<ptrdiff_t>(i), members[i]) !=
          members.begin() + static_cast<ptrdiff_t>(i)) {
        return absl::InvalidArgumentError(
            absl::StrFormat("subgroup: rank %d is named twice", members[i]));
      }
    }
    if (std::find(members.begin(), members.end(), rank.load()) == members.end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "subgroup: rank %d makes a group that it is not in: only its members call subgroup()",
          rank.load()));
    }
    Uuid made(mesh.id());
    made.add("subgroup").add(++subgroups_[{members.begin(), members.end()}]);
    for (const int member : members) {
      made.add(static_cast<uint32_t>(member));
      chosen.push_back(mesh.handles()[member]);
    }
    uuid = made.value();
  }
  return make(chosen, uuid, collectives::internal::options_of(std::move(of_group)));
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::shrink() {
  if (absl::Status status = core.usable(); !status.ok()) return status;
  absl::StatusOr<std::vector<int>> left;
  uint64_t uuid = 0;
  std::vector<Handle> chosen;
  {
    Lock lock(mutex);
    left = survivors.agree(lock);
    if (!left.ok()) return left.status();
    Uuid made(mesh.id());
    made.add("shrink");
    for (const int member : *left) {
      made.add(static_cast<uint32_t>(member));
      chosen.push_back(mesh.handles()[member]);
    }
    uuid = made.value();
  }
  return make(chosen, uuid, options, true);
}

absl::StatusOr<Work> Communicator::Impl::reconfigure(absl::Span<const Handle> members,
                                                     uint64_t uuid, Time timeout) {
  if (absl::Status status = core.usable(); !status.ok()) return status;
  Lock lock(mutex);
  Next next{{members.begin(), members.end()}, uuid, 0, timeout};
  if (absl::Status status = mesh.check(members, uuid, next.rank); !status.ok()) return status;
  if (core.used(uuid)) return core.used_before(uuid);
  if (!failure.broken().ok()) entering_ = Work{};  // it ends, or has ended, with all calls
  if (reconfiguring.has_value() || entering_.sequence != 0) {
    return absl::FailedPreconditionError(
        "another reconfigure() of this communicator is under way: wait() for it first");
  }
  // Messages that ended calls left in flight must arrive first.
  if (!calls->in_flight().empty() || !mesh.unsettled()) end_group();
  absl::StatusOr<Work> work = calls->start_plain();
  if (!work.ok()) return work;
  calls->set_outlives(*work, true);
  entering_ = *work;
  next.settle_by =
      base::deadline_after(core.clock().now(), std::min<Time>(next.timeout / 2, kMostSettling));
  reconfiguring = std::move(next);
  look(core.clock().now());
  return work;
}

void Communicator::Impl::end_group() {
  failure.fail(absl::AbortedError(absl::StrFormat("rank %u reconfigures the group \"%s\"",
                                                  mesh.rank(), options.name)),
               mesh.rank());
}

void Communicator::Impl::enter_next() {
  const Next next = *std::exchange(reconfiguring, std::nullopt);
  const CostParameters cost = tuner->parameters();
  devices->stop();
  mesh.leave();
  splits_ = 0;
  subgroups_.clear();
  calls->set_outlives(entering_, false);
  if (absl::Status status = enter(next.handles, next.uuid, next.rank, true, next.timeout, &cost);
      !status.ok()) {
    calls->end_plain(std::exchange(entering_, Work{}), status);
  }
}

}  // namespace baton

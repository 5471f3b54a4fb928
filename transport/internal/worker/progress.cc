// A worker's start, its round of progress, and which thread makes it.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/durations.h"
#include "transport/base/log.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {
namespace {

constexpr Time kOften = std::chrono::microseconds(50);  // from one help() to the next
constexpr Time kCopyPause = std::chrono::microseconds(5);

// Whether a provider that workers have on request only is asked for.
bool asked_for(const WorkerOptions& options, const std::string& provider) {
  return options.require == provider ||
         std::any_of(options.settings.begin(), options.settings.end(),
                     [&](const auto& one) { return absl::StartsWith(one.first, provider + "."); });
}

// The user's option cannot be met: falling back to another provider would hide that.
bool is_of_options(const absl::Status& status, const WorkerOptions& options) {
  if (absl::IsAlreadyExists(status)) return true;
  if (options.listen_host.empty() && options.advertise.empty() && options.listen_port == 0) {
    return false;
  }
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
         absl::IsPermissionDenied(status);
}

}  // namespace

WorkerCore::WorkerCore(WorkerOptions worker_options, ClusterKey cluster_key, WorkerUid uid,
                       CounterTable counter_table)
    : options(std::move(worker_options)),
      key(std::move(cluster_key)),
      clock(options.clock != nullptr ? *options.clock : Clock::steady()),
      regions(uid),
      counters(std::move(counter_table)),
      slots(options.max_transfers) {
  routes.start(uid);
  self.uid = uid;
  self.name = options.name;
  self.pid = static_cast<uint32_t>(getpid());
}

WorkerCore::~WorkerCore() {
  {
    std::lock_guard lock(mutex);
    transfers.take_submissions();
    for (size_t i = 0; i < peers.size(); ++i) {
      sessions.disconnect(peers[i], absl::CancelledError("the worker was shut down"));
    }
    if (staging != nullptr) staging->finish();
    transfers.finish_stopped();
    closing.free_closed();
    providers.clear();
    staging.reset();
  }
}

absl::Status WorkerCore::start() {
  if (absl::Status status = wakeups.start(); !status.ok()) return status;
  Address self_address{.uid = self.uid, .name = self.name, .host_id = this_host_id()};
  context = std::make_unique<ProviderContext>(ProviderContext{.clock = clock,
                                                              .key = key,
                                                              .self = self,
                                                              .host_id = self_address.host_id,
                                                              .regions = regions,
                                                              .counters = counters,
                                                              .listen_host = options.listen_host,
                                                              .advertise = options.advertise,
                                                              .listen_port = options.listen_port,
                                                              .settings = options.settings});

  SettingsReader read(*context, peer_settings());
  Time redial = std::chrono::seconds(15);
  Time failback = std::chrono::seconds(1);
  Time patience = std::chrono::seconds(15);
  read.ms("peer.redial_ms", redial);
  read.ms("peer.failback_ms", failback);
  read.ms("peer.answer_ms", patience);
  size_t ring_mib = 0;
  read.number("staging.ring_mib", ring_mib);
  ring_bytes = ring_mib << 20;
  read.on_off("staging.kernels", ring_kernels);
  std::string sums;  // collectives look for it themselves
  read.text("staging.sums", sums);
  if (absl::Status status = read.finish(); !status.ok()) return status;
  sessions.start(redial, patience);
  other_routes.start(failback);
  std::vector<std::string> wanted = options.providers;
  if (wanted.empty() && options.extra_providers.empty()) {
    for (const auto& [name, factory] : registered_providers()) {
      const std::string_view why = why_on_request(name);
      if (why.empty() || asked_for(options, name)) {
        wanted.push_back(name);
      } else {
        routes.note_missing(absl::StrCat(name, ": not asked for (providers): ", std::string(why)));
      }
    }
  }
  std::vector<std::unique_ptr<Provider>> made;
  for (const std::string& name : wanted) {
    auto it = std::find_if(registered_providers().begin(), registered_providers().end(),
                           [&](const auto& entry) { return entry.first == name; });
    if (it == registered_providers().end()) return check_provider(name);
    made.push_back(it->second(*context));
  }
  for (const ProviderFactory& factory : options.extra_providers) made.push_back(factory(*context));
  const bool required_is_made =
      options.require.empty() || std::any_of(made.begin(), made.end(), [&](const auto& provider) {
        return provider->capabilities().name == options.require;
      });
  if (!required_is_made) {
    if (absl::Status known = check_provider(options.require); !known.ok()) return known;
  }

  absl::Status not_listening;
  for (std::unique_ptr<Provider>& provider : made) {
    const std::string name = provider->capabilities().name;
    absl::Status status = provider->capabilities().available
                              ? absl::OkStatus()
                              : absl::UnavailableError(provider->capabilities().detail);
    if (status.ok()) {
      if (options.shape) provider = shaped(std::move(provider), *options.shape, clock);
      if (options.timeline != nullptr) {
        provider = traced(std::move(provider), *options.timeline, clock);
      }
      absl::StatusOr<std::string> where = provider->listen();
      status = where.status();
      if (where.ok()) {
        self_address.providers.emplace_back(name, *where);
        const uint16_t at = provider->port();
        if (port == 0 || (at != 0 && at == options.listen_port)) port = at;
      } else if (is_of_options(status, options)) {
        return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
      } else {
        not_listening.Update(status);
      }
    }
    if (!status.ok()) {
      // Asked for by name, it must work; otherwise the others may do.
      const bool named = options.require == name ||
                         (std::find(options.providers.begin(), options.providers.end(), name) !=
                              options.providers.end() &&
                          made.size() == 1);
      if (named) return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
      routes.note_missing(absl::StrCat(name, ": ", status.message()));
      continue;
    }
    if (provider->wait_fd() >= 0) {
      if (absl::Status added = wakeups.watch(provider->wait_fd()); !added.ok()) return added;
    }
    providers.push_back(std::move(provider));
  }
  if (providers.empty()) {
    return absl::UnavailableError(
        absl::StrCat("no provider can be used. ", absl::StrJoin(routes.missing(), "; ")));
  }
  if (options.listen_port != 0 && port != options.listen_port) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "none of the providers %s listens on port %d, where peers would look for this worker: add "
        "tcp, or leave the port out%s",
        absl::StrJoin(self_address.providers, ", ",
                      [](std::string* out, const auto& entry) { out->append(entry.first); }),
        options.listen_port,
        routes.missing().empty()
            ? ""
            : absl::StrCat(". Not used: ", absl::StrJoin(routes.missing(), "; "))));
  }
  const bool all_providers = options.providers.empty() && options.extra_providers.empty();
  if (!options.listen_host.empty() && port == 0 && (!not_listening.ok() || all_providers)) {
    return absl::UnavailableError(absl::StrCat("nothing listens on \"", options.listen_host,
                                               "\": ", absl::StrJoin(routes.missing(), "; ")));
  }
  for (const std::string& note : routes.missing()) {
    base::log_event(base::LogLevel::kInfo, "%s: not used: %s", self.name, note);
  }
  address = self_address.encode();
  if (absl::Status readable = Address::decode(address).status(); !readable.ok()) {
    return absl::InternalError(absl::StrCat(
        "no peer could read this worker's address, so name fewer providers (WorkerOptions::"
        "providers): ",
        readable.message()));
  }
  context->self.address = address;
  for (auto& provider : providers) provider->set_worker_address(address);
  return absl::OkStatus();
}

void WorkerCore::arrived(Rail& rail, const Arrival& arrival) {
  Peer* peer = peers.of(rail);
  if (peer == nullptr) return;
  peer->redial.give_up_at = kNever;  // it is there, and knows us
  auto complete = peer->arrivals.add(arrival);
  if (!complete.ok()) {
    closing.close_later(peer->id(), &rail, complete.status());
    return;
  }
  if (!complete->now) return;
  if (arrival.counter_index == CounterTable::kCredits)
    return dispatcher.take_credit(*peer, arrival.increment);
  if (arrival.counter_index == CounterTable::kControl) {
    return lost_rails.hear(*peer, rail, complete->notify);
  }
  if (arrival.counter_index == CounterTable::kStaging) {
    return staging_for_device_memory().hear(*peer, rail, complete->notify);
  }
  if (arrival.counter_generation != 0) {
    counters.add(arrival.counter_index, arrival.counter_generation, arrival.increment);
    wakeups.signal();
  }
  if (!complete->notify.empty()) inbox.push(*peer, complete->notify);
}

bool WorkerCore::progress() {
  bool any = wakeups.begin_round();
  // Most rounds find nothing to do, and a thread that polls for a message makes many of them: so
  // these checks are inlined here.
  if (slots.has_submitted()) any |= transfers.take_submissions();
  if (outbox.due()) any |= transfers.flush_control_messages();
  if (transfers.any_cancels()) any |= transfers.take_cancels();
  if (transfers.any_deadlines()) any |= transfers.expire(clock.now());
  if (sessions.any_timers()) any |= sessions.progress_sessions(clock.now());
  if (transfers.any_behind_streams()) any |= transfers.look_at_streams();
  if (staging != nullptr) any |= staging->progress();
  if (dispatcher.due()) any |= dispatcher.pump();
  for (auto& provider : providers) any |= provider->progress(*this);
  if (lost_rails.any_questions()) any |= lost_rails.answer_questions();
  if (closing.any()) any |= closing.run();
  if (transfers.any_ended()) any |= transfers.finish_stopped();
  while (sessions.any_partings() && sessions.settle_partings()) any = true;
  // This round consumed the events that would have woken sleeping threads. If anything happened,
  // wake them, as they may wait for it; else they stay asleep with the descriptors armed again.
  if (wakeups.anyone_asleep() && (any || !ready_to_sleep())) wakeups.rouse();
  return any;
}

// True when there is nothing to do, and whatever there is to do from now on will wake the sleepers.
bool WorkerCore::ready_to_sleep() {
  wakeups.about_to_sleep();
  bool idle = !slots.has_submitted() && !transfers.any_cancels() && !closing.any_to_close() &&
              !transfers.any_ended() && !dispatcher.due_now() && !outbox.due() &&
              !wakeups.look_again() && !transfers.any_behind_streams() &&
              (staging == nullptr || !staging->busy());
  for (auto& provider : providers) idle = provider->arm() && idle;
  return idle;
}

bool WorkerCore::arm(Bell& own) {
  wakeups.disarm(own);
  const bool ready = ready_to_sleep();
  ready ? wakeups.armed(own) : wakeups.not_armed();
  return ready;
}

bool WorkerCore::help(bool wait_for_thread) {
  bool any = false;
  {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock) {
      const bool thread_drives = want_to_help();
      if (!wait_for_thread || !thread_drives) return false;
      lock.lock();
    }
    const bool often = clock.now() - helped_at < kOften && thread_bell != nullptr;
    if (often) {
      // Until this round is over, however much it copies: the thread would only wait for the lock.
      helped_often_at.store(kNever, std::memory_order_relaxed);
      // Asleep it would be woken by whatever is done here, for it may be what it sleeps for, and
      // each round would arm it again. Standing back it costs nothing.
      if (wakeups.withdraw(*thread_bell)) thread_bell->ring();
    }
    any = progress();
    on_devices.store(!any && polls(), std::memory_order_relaxed);
    helped_at = clock.now();
    if (often) helped_often_at.store(helped_at, std::memory_order_relaxed);
  }
  if (any) wakeups.tell_waiters();
  return any;
}

// Another thread has the lock. A ProgressThread stands back after this round for a caller that
// helps often: otherwise the two take turns at every piece of a transfer, perhaps on one core.
bool WorkerCore::want_to_help() {
  const Time now = clock.now();
  const bool often = now - tried_at.exchange(now, std::memory_order_relaxed) < kOften;
  Time before = helped_often_at.load(std::memory_order_relaxed);
  if (before == kNever || !threaded.load(std::memory_order_relaxed)) return false;
  if (often) helped_often_at.compare_exchange_strong(before, now, std::memory_order_relaxed);
  return true;
}

bool WorkerCore::polls() const {
  return (staging != nullptr && staging->busy()) ||
         std::any_of(providers.begin(), providers.end(),
                     [](const auto& provider) { return provider->polls(); });
}

bool WorkerCore::helped_lately() const {
  const Time now = clock.now();  // before the other: one that is newer is lately enough
  return now - helped_often_at.load(std::memory_order_relaxed) < kOften;
}

void WorkerCore::recall() {
  if (!helped_lately()) return;
  std::lock_guard lock(mutex);
  helped_often_at.store(kLongAgo, std::memory_order_relaxed);
  if (thread_bell != nullptr) thread_bell->ring();
}

Time WorkerCore::next_timer() {
  Time next = transfers.next_deadline();
  for (auto& provider : providers) next = std::min(next, provider->next_timer());
  // A device does not tell when its copies end.
  if (transfers.any_behind_streams() || (staging != nullptr && staging->busy())) {
    next = std::min(next, clock.now() + kCopyPause);
  }
  if (staging != nullptr) next = std::min(next, staging->next_timer());
  return std::min(next, sessions.next_timer());
}

absl::Status WorkerCore::wait_until(const std::function<bool()>& ready, Time timeout) {
  constexpr Time kSpin = std::chrono::microseconds(20);
  // What a device copies meanwhile is over soon, and says nothing when it is.
  constexpr Time kSpinOnDevices = std::chrono::milliseconds(2);
  const Time begin = clock.now();
  const Time end = base::deadline_after(begin, timeout);
  Time busy = begin;    // when something last happened
  bool helping = true;  // a ProgressThread: it need not be woken for what is done at once
  // Lent to this wait from its first sleep on.
  struct Lent {
    ~Lent() {
      if (own == nullptr) return;
      std::lock_guard lock(impl.mutex);
      impl.wakeups.disarm(*own);
      impl.wakeups.give_back(std::move(own));
    }
    WorkerCore& impl;
    std::unique_ptr<Bell> own;
  } mine{*this, nullptr};
  while (true) {
    if (ready()) return absl::OkStatus();
    const Time now = clock.now();
    if (now >= end) return absl::DeadlineExceededError("the wait's timeout ran out");
    if (threaded.load(std::memory_order_acquire)) {
      if (helping) {
        if (help(true)) busy = now;
        if (now - busy < kSpin) continue;
        if (on_devices.load(std::memory_order_relaxed) && now - begin < kSpinOnDevices) continue;
        helping = false;
        recall();
      }
      const Time nap = std::min<Time>(end - now, std::chrono::milliseconds(50));
      if (wakeups.await_told(nap, ready)) return absl::OkStatus();
      continue;
    }
    bool armed = false;
    Time timer = kNever;
    {
      std::lock_guard lock(mutex);
      if (mine.own != nullptr) wakeups.disarm(*mine.own);
      if (progress()) {
        busy = now;
        continue;
      }
      if (now - busy < kSpin) continue;
      if (mine.own == nullptr) {
        absl::StatusOr<std::unique_ptr<Bell>> bell = wakeups.borrow_bell();
        if (!bell.ok()) return bell.status();
        mine.own = *std::move(bell);
      }
      armed = arm(*mine.own);
      if (armed) timer = next_timer();
    }
    if (!armed) continue;
    if (ready()) return absl::OkStatus();
    wakeups.sleep(*mine.own, std::min(end, timer));
  }
}

}  // namespace baton::internal

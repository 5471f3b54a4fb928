// Connections to other processes, what is said over them, and the thread that advances calls.
#include "collectives/internal/endpoint_impl.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "transport/address.h"
#include "transport/base/durations.h"
#include "transport/base/log.h"

namespace baton::collectives::internal {

using executor::RegionTable;

namespace {

constexpr const char* kAckHold = "2000";  // us
// How long the one of two processes that does not call waits for the call of the other.
constexpr Time kCallPatience = std::chrono::seconds(1);
constexpr Time kNoAnswer = std::chrono::seconds(1);  // a call that fails later was not answered
constexpr Time kLookEvery = std::chrono::milliseconds(1);
constexpr Time kLeaving = std::chrono::milliseconds(50);  // for the goodbyes of others
constexpr size_t kMostKeptGroups = 1024;                  // not made here yet
constexpr size_t kMostKeptOfGroup = 4096;
constexpr Time kBackgroundSpin = std::chrono::microseconds(5);
constexpr Time kLongestBackgroundSleep = std::chrono::milliseconds(10);
constexpr Time kIdleSleep = std::chrono::milliseconds(50);

// The callbacks that this thread runs: one may wait for a call whose callback is due.
struct Running {
  const void* table;
  const Running* outer;
};
thread_local const Running* running = nullptr;

struct Hello {
  uint32_t version = 0;
  uint32_t unused = 0;
  uint64_t offset = 0;  // of the RegionTable in its region, which follows
};

}  // namespace

absl::StatusOr<std::unique_ptr<EndpointImpl>> EndpointImpl::open(EndpointOptions options) {
  std::unique_ptr<EndpointImpl> endpoint(new EndpointImpl(std::move(options)));
  if (absl::Status status = endpoint->start(); !status.ok()) return status;
  return endpoint;
}

absl::Status EndpointImpl::start() {
  const auto prefer = [this](const std::string& name, const char* value) {
    SettingValues& settings = options_.worker.settings;
    const bool given = std::any_of(settings.begin(), settings.end(),
                                   [&](const auto& one) { return one.first == name; });
    if (!given) settings.emplace_back(name, value);
  };
  for (const Setting& known : known_settings()) {
    const std::string name(known.name);
    // No rank waits for acknowledgements of small messages: they are copied when they are sent, and
    // slots go back by other words.
    if (name.ends_with(".ack_us")) prefer(name, kAckHold);
    // A slab of each of n processes, mapped by each, is what made starts quadratic.
    if (name == "shm.populate") prefer(name, "off");
  }
  absl::StatusOr<std::unique_ptr<Worker>> made = Worker::create(options_.worker);
  if (!made.ok()) return made.status();
  worker_ = *std::move(made);
  executor::Memory::Limits limits;
  limits.slab_bytes = options_.slab_bytes;
  absl::StatusOr<std::unique_ptr<executor::Memory>> pool =
      executor::Memory::create(*worker_, limits);
  if (!pool.ok()) return pool.status();
  memory_ = *std::move(pool);
  absl::StatusOr<Block> block = memory_->allocate(sizeof(RegionTable));
  if (!block.ok()) return block.status();
  table_memory_ = *block;
  table_ = reinterpret_cast<RegionTable*>(table_memory_.data);
  handle_ = Handle::of(*worker_);
  uid_ = handle_.uid();
  if (options_.background) background_ = std::thread([this] { run_background(); });
  return absl::OkStatus();
}

absl::Status EndpointImpl::forked() {
  return absl::InvalidArgumentError(
      "the endpoint and its communicators belong to the process that this one was forked from: "
      "open an endpoint of this process's own after fork()");
}

EndpointImpl::~EndpointImpl() {
  if (background_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      background_wakes_.notify_all();
    }
    background_.join();
  }
  if (worker_ != nullptr && table_ != nullptr) say_goodbye();
  // A process that has not released our sends by now does not answer: links must not wait for it.
  for (auto& [uid, process] : processes_) {
    if (remains_.empty() || !process->up) continue;
    worker_->disconnect(process->peer, Time::zero()).IgnoreError();
  }
  for (auto& [id, remains] : remains_) remains.reset();
  for (auto& [uid, process] : processes_) process->view = RemoteView{};
  if (memory_ != nullptr && table_memory_.data != nullptr) memory_->free(table_memory_);
  memory_.reset();
}

// Processes mostly leave together: a moment's wait spares them looking into a peer that has gone.
void EndpointImpl::say_goodbye() {
  bool any = false;
  for (auto& [uid, process] : processes_) {
    tell(*process, 0, ControlMessage::kGoodbye, "");
    any |= process->up;
  }
  if (!any) return;
  const Time begin = clock().now();
  const Time real_begin = Clock::steady().now();
  do {
    const bool moved = worker_->progress();
    drain();
    std::erase_if(remains_, [](const auto& entry) { return entry.second->over(); });
    if (remains_.empty() && !unsent_ && worker_->stats().open_transfers == 0) return;
    if (!moved) nap(std::chrono::milliseconds(1), nap_ticket());
    // Virtual time stands still here.
    if (Clock::steady().now() - real_begin > 2 * kLeaving && clock().now() == begin) return;
  } while (clock().now() - begin < kLeaving);
}

// --- memory --------------------------------------------------------------------------------------

absl::StatusOr<CommBuffer> EndpointImpl::allocate(size_t bytes) {
  absl::StatusOr<Block> block = memory_->allocate_for_caller(std::max<size_t>(bytes, 64));
  if (!block.ok()) return block.status();
  if (absl::Status status = publish_regions(); !status.ok()) return status;
  size_t index = 0;
  while (index < buffers_.size() && buffers_[index].data != nullptr) ++index;
  if (index == buffers_.size()) buffers_.emplace_back();
  buffers_[index] = *block;
  return CommBuffer{block->data, bytes, static_cast<uint32_t>(index)};
}

void EndpointImpl::free(const CommBuffer& buffer) {
  if (buffer.index >= buffers_.size()) return;
  Block& block = buffers_[buffer.index];
  if (block.data == nullptr || block.data != buffer.data) return;
  memory_->free(block);
  block = Block{};
}

absl::Status EndpointImpl::publish_new_regions() {
  const auto& regions = memory_->regions();
  for (; published_ < regions.size(); ++published_) {
    absl::StatusOr<RemoteRegion> region = worker_->remote_region(regions[published_].local);
    if (!region.ok()) return region.status();
    const std::string bytes = region->encode();
    std::memcpy(table_->regions[published_].bytes, bytes.data(), bytes.size());
    table_->count.store(static_cast<uint32_t>(published_ + 1), std::memory_order_release);
  }
  return absl::OkStatus();
}

// --- processes -----------------------------------------------------------------------------------

Process& EndpointImpl::process_of(const WorkerUid& uid) {
  std::unique_ptr<Process>& process = processes_[uid.bytes];
  if (process == nullptr) {
    process = std::make_unique<Process>();
    process->uid = uid;
  }
  return *process;
}

Process& EndpointImpl::process(const Handle& handle) {
  Process& process = process_of(handle.uid());
  if (!process.has_handle) {
    process.handle = handle;
    process.has_handle = true;
  }
  return process;
}

template <typename... Args>
void EndpointImpl::tell_groups(void (Group::*what)(Process&, Args...), Process& process,
                               Args... args) {
  for (size_t i = 0; i < all_.size(); ++i) {
    wake(*all_[i]);
    (all_[i]->*what)(process, args...);
  }
}

Process* EndpointImpl::process_at(PeerId peer) {
  const auto found = by_peer_.find({peer.index, peer.generation});
  return found == by_peer_.end() ? nullptr : found->second;
}

void EndpointImpl::want(Process& process) {
  if (process.goodbye || (process.known && !process.down) || process.wanted_since != kNever) return;
  process.down = process.known = process.parted = false;
  process.wanted_since = clock().now();
  unsettled_.push_back(&process);
  if (uid_.bytes < process.uid.bytes) call(process);
}

void EndpointImpl::came_up(Process& process) {
  process.up = true;
  process.down = process.told = process.parted = false;
  process.unsent.clear();
  process.can_view = process.we_can_view = -1;
  process.wanted_since = kNever;
  if (std::find(unsettled_.begin(), unsettled_.end(), &process) == unsettled_.end()) {
    unsettled_.push_back(&process);
  }
  Hello hello;
  hello.version = kCollectivesVersion;
  hello.offset = table_memory_.offset;
  absl::StatusOr<RemoteRegion> region = worker_->remote_region(table_memory_.region);
  if (!region.ok()) return go_down(process, region.status());
  tell(process, 0, ControlMessage::kHello,
       std::string(reinterpret_cast<const char*>(&hello), sizeof hello) + region->encode());
}

void EndpointImpl::look_at_table(Process& process) {
  if (!process.up || !process.told || process.we_can_view >= 0) return;
  absl::StatusOr<RemoteView> view = worker_->view(process.peer, process.table);
  if (absl::IsUnavailable(view.status())) return;  // the connection is still coming up
  const bool fits = view.ok() && process.table_offset <= view->size &&
                    sizeof(RegionTable) <= view->size - process.table_offset;
  process.we_can_view = fits ? 1 : 0;
  if (fits) {
    process.view = *std::move(view);
    process.view.data += process.table_offset;
  }
  tell(process, 0, ControlMessage::kView, fits ? "1" : "0");
  became_ready(process);
}

void EndpointImpl::became_ready(Process& process) {
  if (process.ready()) tell_groups(&Group::on_ready, process);
}

void EndpointImpl::go_down(Process& process, const absl::Status& why) {
  process.up = false;
  process.down = true;
  process.unsent.clear();
  process.why_down = why;
  process.wanted_since = kNever;
  if (!process.goodbye) tell_groups<const absl::Status&>(&Group::on_down, process, why);
}

void EndpointImpl::call(Process& process) {
  const auto called = [&]() -> absl::StatusOr<PeerId> {
    if (!process.address.empty()) return worker_->connect(process.address);
    if (!process.has_handle) return absl::NotFoundError("its handle is not known here");
    const std::string address = process.handle.address();
    if (address.empty()) {
      return absl::FailedPreconditionError(
          "it has no provider that this process can reach it by: both need tcp, or, on one machine "
          "and in the same network and process (pid) namespaces, shm");
    }
    return worker_->connect(address);
  }();
  process.wanted_since = kNever;
  if (!called.ok()) return go_down(process, called.status());
  process.peer = *called;
  process.known = true;
  process.called_at = clock().now();
  by_peer_[{called->index, called->generation}] = &process;
}

void EndpointImpl::on_events() {
  while (std::optional<PeerEvent> event = worker_->next_peer_event()) {
    Process* process = process_at(event->peer);
    if (event->kind == PeerEvent::Kind::kUp) {
      if (process != nullptr && !(process->uid == event->uid)) {
        by_peer_.erase({event->peer.index, event->peer.generation});
        worker_->begin_disconnect(event->peer, Time::zero());
        go_down(*process, absl::NotFoundError(
                              "another process lives at its address: fetch its handle again"));
        continue;
      }
      if (process == nullptr) {
        process = &process_of(event->uid);
        by_peer_[{event->peer.index, event->peer.generation}] = process;
      }
      if (process->up) continue;  // both have called: one of the two connections is enough
      process->peer = event->peer;
      process->known = true;
      came_up(*process);
    } else if (process != nullptr && event->kind == PeerEvent::Kind::kDown) {
      by_peer_.erase({event->peer.index, event->peer.generation});
      if (!(process->peer == event->peer)) continue;
      // A process that computes does not answer for a while: it is called until the deadline of a
      // call, or of the start. A process that refuses does so at once.
      if (!process->up && !all_.empty() && clock().now() - process->called_at >= kNoAnswer) {
        call(*process);
      } else {
        go_down(*process, event->why);
      }
    }
  }
}

// --- messages ------------------------------------------------------------------------------------

void EndpointImpl::tell(Process& process, uint64_t group, ControlMessage kind,
                        std::string_view body) {
  if (!process.up) return;
  std::string text(kHeadBytes, 0);
  write_head(group, kind, text.data());
  text += body;
  if (process.unsent.empty() && send(process, text)) return;
  process.unsent.push_back(std::move(text));
  unsent_ = true;
}

// False: not now. Any other failure ends the connection, and is told then.
bool EndpointImpl::send(const Process& process, std::string_view text) {
  if (absl::IsResourceExhausted(worker_->notify_detached(process.peer, text))) return false;
  told_ = true;
  return true;
}

void EndpointImpl::flush() {
  if (std::exchange(unsent_, false)) {
    for (auto& each : processes_) {
      Process& process = *each.second;
      std::vector<std::string>& unsent = process.unsent;
      const auto rest = std::find_if(unsent.begin(), unsent.end(),
                                     [&](const std::string& text) { return !send(process, text); });
      unsent.erase(unsent.begin(), rest);
      unsent_ |= !unsent.empty();
    }
  }
  if (std::exchange(told_, false)) worker_->progress();
}

void EndpointImpl::drain() {
  while (worker_->next_notification(notification_)) {
    Process* process = process_at(notification_.peer);
    // A first message may arrive before the event that the connection is up.
    if (process == nullptr || !process->up) {
      on_events();
      process = process_at(notification_.peer);
    }
    if (process != nullptr) on_notification(*process, notification_.payload);
  }
  on_events();
  flush();
}

void EndpointImpl::on_notification(Process& from, std::string_view payload) {
  uint64_t id = 0;
  if (payload.size() <= sizeof id) return;  // a DirectLink wakes us
  std::memcpy(&id, payload.data(), sizeof id);
  const auto kind = static_cast<ControlMessage>(payload[sizeof id]);
  const std::string_view body = payload.substr(sizeof id + 1);
  if (id == 0) return on_own_message(from, kind, body);
  if (const auto found = groups_.find(id); found != groups_.end()) {
    wake(*found->second);
    found->second->on_control_message(from, kind, body);
  } else if (used_.contains(id)) {
    if (const auto left = remains_.find(id); left != remains_.end()) {
      left->second->on_control_message(from, kind);
    }
    if (kind == ControlMessage::kJoin) {  // of a rank that had not met this one before it left
      tell(from, id, ControlMessage::kBye, "");
      tell(from, id, ControlMessage::kEnded, "");
    }
  } else {
    keep(id, from, kind, body);
  }
}

void EndpointImpl::on_own_message(Process& from, ControlMessage kind, std::string_view body) {
  if (kind == ControlMessage::kGoodbye) {
    from.goodbye = true;
    tell_groups(&Group::on_goodbye, from);
  } else if (kind == ControlMessage::kView) {
    from.can_view = body == "1" ? 1 : 0;
    became_ready(from);
  } else if (kind == ControlMessage::kHello) {
    Hello hello;
    if (body.size() < sizeof hello) return;
    std::memcpy(&hello, body.data(), sizeof hello);
    if (hello.version != kCollectivesVersion) {
      return go_down(from, absl::FailedPreconditionError(absl::StrFormat(
                               "it speaks version %u of the collectives, this process %u: install "
                               "the same Baton everywhere",
                               hello.version, kCollectivesVersion)));
    }
    absl::StatusOr<RemoteRegion> region = RemoteRegion::decode(body.substr(sizeof hello));
    if (!region.ok()) return go_down(from, region.status());
    from.table = *region;
    from.table_offset = hello.offset;
    from.told = true;
    look_at_table(from);
  }
}

void EndpointImpl::keep(uint64_t id, Process& from, ControlMessage kind, std::string_view body) {
  const auto [found, fresh] = kept_.try_emplace(id);
  if (fresh) {
    kept_ids_.push_back(id);
    if (kept_ids_.size() > kMostKeptGroups) {
      base::log_event(base::LogLevel::kWarning,
                      "collectives: ranks have joined %u groups that this process has not made: "
                      "messages of the oldest are dropped",
                      kept_ids_.size());
      kept_.erase(kept_ids_.front());
      kept_ids_.pop_front();
    }
  }
  if (found->second.size() < kMostKeptOfGroup) {
    found->second.push_back({&from, kind, std::string(body)});
  }
}

// --- groups --------------------------------------------------------------------------------------

absl::Status EndpointImpl::used_before(uint64_t id) {
  return absl::AlreadyExistsError(absl::StrFormat(
      "the uuid %u was used before by this process: give every group, and every reconfigure(), a "
      "new one",
      id));
}

absl::Status EndpointImpl::add_group(uint64_t id, Group& group) {
  if (!used_.insert(id).second) return used_before(id);
  groups_[id] = &group;
  all_.push_back(&group);
  awake_.push_back(&group);
  group.added_ = group.awake_ = true;
  return absl::OkStatus();
}

void EndpointImpl::deliver_kept(uint64_t id) {
  const auto found = kept_.find(id);
  if (found == kept_.end()) return;
  const std::vector<Kept> kept = std::move(found->second);
  kept_.erase(found);
  std::erase(kept_ids_, id);
  for (const Kept& one : kept) {
    const auto group = groups_.find(id);
    if (group == groups_.end()) break;
    group->second->on_control_message(*one.from, one.kind, one.body);
  }
  flush();
}

void EndpointImpl::remove_group(uint64_t id, std::unique_ptr<Remains> remains) {
  if (const auto found = groups_.find(id); found != groups_.end()) {
    std::erase(all_, found->second);
    std::erase(awake_, found->second);
    found->second->added_ = found->second->awake_ = false;
    groups_.erase(found);
  }
  if (remains != nullptr && !remains->over()) remains_[id] = std::move(remains);
}

bool EndpointImpl::tick() {
  const bool any = worker_->progress();
  drain();
  ticked_at_ = clock().now();
  look_at_all(ticked_at_);
  flush();
  return any;
}

void EndpointImpl::look_at_all(Time now) {
  if (!unsettled_.empty()) look_at_processes(now);
  if (now < next_look_) return;
  next_look_ = now + kLookEvery;
  std::erase_if(remains_, [](const auto& entry) { return entry.second->over(); });
  for (size_t i = 0; i < awake_.size(); ++i) awake_[i]->look(now);
  std::erase_if(awake_, [](Group* group) {
    group->awake_ = !group->idle();
    if (!group->awake_) group->set_sleeping(0);
    return !group->awake_;
  });
}

void EndpointImpl::wake_now(Group& group) {
  group.awake_ = true;
  awake_.push_back(&group);
  group.set_sleeping(sleepers_);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // as in set_sleepers()
}

void EndpointImpl::look_at_processes(Time now) {
  const std::vector<Process*> unsettled = unsettled_;
  for (Process* process : unsettled) {
    if (process->wanted_since != kNever && now - process->wanted_since >= kCallPatience) {
      call(*process);
    }
    look_at_table(*process);
  }
  std::erase_if(unsettled_, [](const Process* process) {
    return process->wanted_since == kNever && (!process->up || process->we_can_view >= 0);
  });
}

bool EndpointImpl::advance_others(const Group* but) {
  bool any = false;
  for (size_t i = 0; i < awake_.size(); ++i) {
    if (awake_[i] != but && awake_[i]->busy()) any |= awake_[i]->advance();
  }
  return any;
}

bool EndpointImpl::progress() {
  bool any = false;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(caller_sleeps_, false)) end_sleep();
    any = advance_others(nullptr);
    any |= tick();
    if (!any && caller_has_fd_) {
      begin_sleep();
      caller_sleeps_ = true;
      any = advance_others(nullptr) || !worker_->arm();
    }
  }
  run_callbacks();
  return any;
}

int EndpointImpl::event_fd() {
  std::lock_guard lock(mutex_);
  caller_has_fd_ = true;
  return worker_->wait_fd();
}

bool EndpointImpl::in_callback_of(const void* table) {
  for (const Running* one = running; one != nullptr; one = one->outer) {
    if (one->table == table) return true;
  }
  return false;
}

bool EndpointImpl::run_callbacks() {
  Lock lock(mutex_);
  for (bool any = false;; any = true) {
    if (ended_.empty()) return any;
    // One by one: it may wait for the next one.
    const Ended one = std::move(ended_.front());
    ended_.pop_front();
    lock.unlock();
    const Running now{one.table, running};
    running = &now;
    one.on_end(one.context, Work{one.work}, one.status);
    running = now.outer;
    lock.lock();
    one.returned(one.table, one.work);
  }
}

// --- waiting -------------------------------------------------------------------------------------

uint64_t EndpointImpl::nap_ticket() {
  std::lock_guard lock(nap_mutex_);
  return naps_;
}

void EndpointImpl::nap(Time longest, uint64_t ticket) {
  {
    std::unique_lock lock(nap_mutex_);
    if (naps_ != ticket) return;
    if (napping_) {  // the worker has one bell
      nap_over_.wait_for(lock, longest, [&] { return naps_ != ticket; });
      return;
    }
    napping_ = true;
  }
  if (worker_->arm()) {
    const Time timer = worker_->next_timer();
    if (timer != kNever) {
      longest = std::min(longest, std::max(Time::zero(), timer - clock().now()));
    }
    pollfd fd{.fd = worker_->wait_fd(), .events = POLLIN, .revents = 0};
    const timespec timeout = base::to_timespec(longest);
    ppoll(&fd, 1, &timeout, nullptr);
  }
  std::lock_guard lock(nap_mutex_);
  napping_ = false;
  ++naps_;
  nap_over_.notify_all();
}

void EndpointImpl::run_background() {
  const auto working = [&] {
    return std::any_of(awake_.begin(), awake_.end(),
                       [](const Group* group) { return group->busy(); });
  };
  Time idle_since = Time::zero();
  while (true) {
    bool moved = false;
    bool idle = false;
    {
      Lock lock(mutex_);
      if (stop_) return;
      if (!working()) {
        background_wakes_.wait_for(lock, kIdleSleep, [&] { return stop_ || working(); });
        if (stop_) return;
        tick();
      }
      moved = advance_others(nullptr);
      idle = !working();
    }
    moved |= run_callbacks();
    if (moved) {
      idle_since = Time::zero();
      continue;
    }
    if (idle) continue;
    const Time time = clock().now();
    if (idle_since == Time::zero()) idle_since = time;
    if (time - idle_since <= kBackgroundSpin) continue;
    const uint64_t ticket = nap_ticket();
    {
      Lock lock(mutex_);
      begin_sleep();
      moved = advance_others(nullptr);
    }
    if (!moved) nap(kLongestBackgroundSleep, ticket);
    Lock lock(mutex_);
    end_sleep();
  }
}

// A sleeper raises its flags and then checks again what peers have published.
void EndpointImpl::set_sleepers(uint32_t sleepers) {
  sleepers_ = sleepers;
  for (Group* group : awake_) group->set_sleeping(sleepers_);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace baton::collectives::internal

// One side of a schedule of real faults: it submits, cancels, cuts its own sockets, sleeps, and
// uses the memory of what has landed for something else at once.
#include <netinet/in.h>

#include "tests/hostile/real_schedule.h"
#include "tests/std.h"
#include "tests/until.h"
#include "transport/worker.h"

namespace baton {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

uint16_t port_of(const sockaddr_storage& address) {
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// Whether a descriptor is a connection between two workers: those of UCX's own end the process by
// an assertion of UCX's (tcp_cm.c) when they are cut as they come up.
bool is_ours(int fd, const RealSide& here, const RealSide& there) {
  sockaddr_storage local{}, peer{};
  socklen_t size = sizeof local;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) != 0) return false;
  size = sizeof peer;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
  if (local.ss_family == AF_UNIX) return true;
  return port_of(local) == here.port || port_of(peer) == there.port;
}

// Ends one of the connections, as somebody on the way might.
bool cut_a_connection(std::mt19937_64& random, const RealSide& here, const RealSide& there) {
  std::vector<int> open;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::stoi(entry.path().filename().string());
    if (is_ours(fd, here, there)) open.push_back(fd);
  }
  if (open.empty()) return false;
  return shutdown(open[random() % open.size()], SHUT_RDWR) == 0;
}

class Side {
 public:
  Side(RealSchedule& schedule, size_t side)
      : plan_(schedule),
        shared_(*schedule.shared),
        mine_(schedule.shared->sides[side]),
        other_(schedule.shared->sides[1 - side]),
        side_(side),
        random_(schedule.seed * 2 + side) {}

  void run() {
    if (!start() || !meet()) return;
    for (size_t i = 0; i < kRealTransfers; ++i) {
      if (plan_.plan[i].from == side_) own_.push_back(i);
    }
    size_t next = 0;
    for (int round = 0; round < 250 || shared_.allowed < kRealTransfers; ++round) {
      if (next < own_.size() && own_[next] < shared_.allowed && pick(6) == 0) submit(own_[next++]);
      disturb();
      step();
    }
    while (next < own_.size()) submit(own_[next++]);
    const bool leaves = plan_.network.survives && pick(side_ == plan_.seed % 2 ? 6 : 24) == 0;
    if (leaves && !leave()) return;
    until([&] { return open_ == 0; }, "transfers end");
    mine_.done = 1;
    until([&] { return shared_.finish != 0; }, "both sides are done");
    // What the other side knows to have been delivered is here, or on its last steps.
    until([&] { return down_ || told(); }, "what was delivered is announced");
    const Time end = Clock::steady().now() + milliseconds(3);
    while (Clock::steady().now() < end) step();
    for (size_t i = 0; i < kRealTransfers; ++i) {
      if (counted(i)) shared_.items[i].counter = worker_->counter_value(counters_[i]);
    }
    mine_.resumed = worker_->stats().peers_resumed;
    worker_.reset();
  }

 private:
  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  bool counted(size_t i) const {
    return plan_.plan[i].op == Op::kWrite && plan_.plan[i].target() == side_;
  }
  void fail(const std::string& why) {
    std::snprintf(mine_.failure, sizeof mine_.failure, "%s", why.c_str());
  }

  bool start() {
    auto worker = Worker::create({.name = "side",
                                  .providers = {plan_.provider},
                                  .key = *ClusterKey::from_bytes("0123456789abcdef"),
                                  .listen_host = plan_.network.own ? "0.0.0.0" : "",
                                  .max_transfers = 192,
                                  .settings = plan_.settings});
    if (!worker.ok()) return fail(worker.status().ToString()), false;
    worker_ = *std::move(worker);
    const BackingFile file{.fd = plan_.with_file ? plan_.files[side_] : -1};
    auto region = worker_->register_memory(plan_.memory[side_], 2 * kRealHalf,
                                           Access::kRemoteReadWrite, file);
    if (!region.ok()) return fail(region.status().ToString()), false;
    region_ = *region;
    mine_.remote = *worker_->remote_region(region_);
    for (size_t i = 0; i < kRealTransfers; ++i) {
      if (!counted(i)) continue;
      counters_[i] = *worker_->allocate_counter();
      shared_.items[i].remote_counter = worker_->remote_counter(counters_[i]);
    }
    std::snprintf(mine_.address, sizeof mine_.address, "%s", worker_->address().c_str());
    mine_.port = worker_->port();
    mine_.ready = 1;
    return true;
  }

  bool meet() {
    // It answers while it waits: the other one may be connecting already.
    const auto ready = [&] { return other_.ready != 0; };
    until(ready, "the other side starts");
    if (side_ == 0) {
      auto peer = worker_->connect(other_.address);
      if (!peer.ok()) return fail(peer.status().ToString()), false;
      peer_ = *peer;
    }
    const auto met = [&] {
      // A call whose patience is short for its faults may be late on a busy machine.
      if (plan_.network.own && side_ == 0 && down_ && !up_) call_again();
      return up_ || down_;
    };
    until(met, "the other side is met");
    if (down_) return fail("the other side was not met"), false;
    mine_.began = 1;
    // Faults are for those who have met: who has not may wait for its turn on a busy machine until
    // the other one has done all of its rounds, and left.
    const auto both = [&] { return other_.began != 0; };
    until(both, "the other side begins");
    return true;
  }

  void call_again() {
    down_ = false;
    mine_.down = 0;
    for (RealItem& item : shared_.items) item.frozen = 0;
    peer_ = *worker_->connect(other_.address);
  }

  void submit(size_t number) {
    const RealPlan& item = plan_.plan[number];
    RealItem& fate = shared_.items[number];
    const size_t here = number * kRealBlock;
    const bool write = item.op == Op::kWrite;
    contexts_[number] = {this, number};
    TransferRequest request{
        .op = item.op,
        .peer = peer_,
        .local = region_,
        .local_layout = Layout::contiguous(here + (write ? 0 : kRealHalf), item.bytes),
        .remote = other_.remote,
        .remote_layout = Layout::contiguous(here + (write ? kRealHalf : 0), item.bytes),
        .timeout = item.timeout_ms < 0 ? kNever : milliseconds(item.timeout_ms),
        .on_end = &Side::on_end,
        .context = &contexts_[number]};
    const std::string notify = std::to_string(number);
    if (write) {
      request.counter = fate.remote_counter;
      request.notify = notify;
    }
    fate.submitted = 1;
    auto id = worker_->submit(request);
    if (!id.ok()) {
      fate.submitted = 0;
      return;
    }
    ids_[number] = *id;
    ++open_;
  }

  void disturb() {
    switch (pick(plan_.network.own ? 2000 : 48)) {  // a network's faults take longer
      case 0:
      case 1:
        if (cut_a_connection(random_, mine_, other_)) ++mine_.cuts;
        break;
      case 2:
        std::this_thread::sleep_for(microseconds(pick(4000)));
        break;
      case 3:
        if (!own_.empty()) {
          const size_t number = own_[pick(own_.size())];
          RealItem& fate = shared_.items[number];
          if (fate.submitted == 0 || fate.ended != 0) break;
          fate.cancelled = 1;
          (void)worker_->cancel(ids_[number]);
        }
        break;
      default:
        if (pick(4) == 0) std::this_thread::sleep_for(microseconds(100));
    }
  }

  // When disconnect() is over, this side's memory is its own again.
  bool leave() {
    mine_.left = 1;
    worker_->begin_disconnect(peer_);
    const auto over = [&] { return worker_->peer_state(peer_) == PeerState::kDown; };
    until(over, "disconnect() ends");
    if (open_ != 0) return fail("transfers are open after disconnect()"), false;
    if (absl::Status how = worker_->disconnect(peer_); !how.ok()) {
      // A host that had moved before its process was killed is not known to be the one that
      // refuses.
      if (shared_.killed != 0 && absl::IsUnavailable(how)) return true;
      return fail(how.ToString()), false;
    }
    step();  // what had been announced is read
    for (size_t i = 0; i < kRealTransfers; ++i) {
      if (plan_.plan[i].target() != side_) continue;
      std::fill_n(plan_.destination(i), kRealBlock, kRealReused);
      shared_.items[i].parted = 1;
    }
    return true;
  }

  void step() {
    const bool any = worker_->progress();
    while (worker_->next_notification(notification_)) {
      const size_t number = std::stoul(notification_.payload);
      if (shared_.items[number].notified.fetch_add(1) == 0) reuse(number);
    }
    while (auto event = worker_->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) up_ = true;
      if (event->kind == PeerEvent::Kind::kUp) peer_ = event->peer;
      if (event->kind == PeerEvent::Kind::kDown) other_is_gone();
    }
    if (!any) std::this_thread::sleep_for(microseconds(20));
  }
  // Before it gives up, it tells the process that waits for this one.
  template <typename Fact>
  void until(const Fact& fact, const char* what, CallSite from = CallSite::here()) {
    const auto state = [&] {
      const std::string now =
          absl::StrCat("it never came that ", what, ": ", state_of(*worker_, peer_, "this side"));
      fail(now);
      return now;
    };
    baton::until(
        fact, [&] { step(); }, state, from);
  }

  // The memory of what was announced is this side's own again.
  void reuse(size_t number) {
    char* target = plan_.destination(number);
    for (size_t at = 0; at < plan_.plan[number].bytes; ++at) {
      if (target[at] != real_byte(plan_.seed, number, at)) ++shared_.items[number].wrong;
    }
    std::fill(target, target + kRealBlock, kRealReused);
  }

  // Nothing of the other side's lands here from now on, whether its end was orderly or not.
  void other_is_gone() {
    down_ = true;
    mine_.down = 1;
    for (size_t i = 0; i < kRealTransfers; ++i) {
      if (!counted(i) || shared_.items[i].notified != 0) continue;
      freeze(i);
    }
  }
  void freeze(size_t number) {
    std::memcpy(shared_.items[number].at_end, plan_.destination(number), kRealBlock);
    shared_.items[number].frozen = 1;
  }

  // All that the other side has as done was announced here.
  bool told() {
    for (size_t i = 0; i < kRealTransfers; ++i) {
      const RealItem& item = shared_.items[i];
      if (counted(i) && item.ended != 0 && item.code == 0 && item.notified == 0) return false;
    }
    return true;
  }

  static void on_end(void* context, TransferId, const absl::Status& status) {
    const auto& [side, number] = *static_cast<std::pair<Side*, size_t>*>(context);
    RealItem& fate = side->shared_.items[number];
    const RealPlan& item = side->plan_.plan[number];
    side->freeze(number);
    char* source = side->plan_.block(1 - item.target(), number, false);
    std::fill(source, source + kRealBlock, kRealPoison);
    std::snprintf(fate.words, sizeof fate.words, "%s", status.ToString().c_str());
    fate.code = static_cast<int>(status.code());
    if (fate.ended.fetch_add(1) == 0) --side->open_;
  }

  RealSchedule& plan_;
  RealShared& shared_;
  RealSide& mine_;
  RealSide& other_;
  const size_t side_;
  std::mt19937_64 random_;
  std::unique_ptr<Worker> worker_;
  MemoryRegion region_;
  PeerId peer_;
  bool up_ = false;
  bool down_ = false;
  int open_ = 0;
  std::vector<size_t> own_;
  std::array<TransferId, kRealTransfers> ids_;
  std::array<CounterId, kRealTransfers> counters_;
  std::array<std::pair<Side*, size_t>, kRealTransfers> contexts_;
  Notification notification_;
};

}  // namespace

void run_real_side(RealSchedule& schedule, size_t side) { Side(schedule, side).run(); }

}  // namespace baton

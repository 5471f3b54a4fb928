// The sender: streams pieces, has a fault injected in the middle, and judges what came of it.
//
// It writes the same memory again and again, in rounds: all pieces at once, each raising a counter.
// After each round the target checks every byte and tells its counter.
#include <iostream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "tests/softroce/faults.h"
#include "tests/softroce/rig.h"
#include "tests/std.h"
#include "transport/pool.h"

namespace baton::softroce {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr Time kPatience = seconds(40);  // nothing may take longer
constexpr Time kGrace = milliseconds(200);

struct Times {  // of one piece
  Time submitted;
  Time ended;
};

class Sender {
 public:
  Sender(const std::string& board, const Case& which) : board_(board), case_(which) {}

  absl::Status start(const std::string& host);
  void run();
  void complain(std::string what) {
    if (complaints_.size() < 3) complaints_.push_back(std::move(what));
  }
  int report() const;

 private:
  absl::Status meet();  // the target that wrote the offer
  absl::Status start_target();
  bool lost() const { return worker_->peer_state(peer_) == PeerState::kDown; }
  // Sends all pieces once. False: the peer was lost (and every piece has ended).
  bool round(Time timeout = kNever);
  // Has the target check the last round. False: it was lost.
  bool check();
  bool checked_round() { return round() && check(); }
  [[noreturn]] void give_up() const;
  void look();  // for the moment at which the fault is noticed
  void inject();
  void finish_injection();
  absl::Status undo() const;
  bool reaches(PeerId peer);
  void after();

  const Board board_;
  const Case& case_;
  Lateness lateness_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<MemoryPool> pool_;
  Block block_;
  PeerId peer_;
  RemoteRegion remote_;
  size_t remote_offset_ = 0;
  RemoteCounter counter_;
  std::optional<uint64_t> counted_;  // the target's counter after the last check
  uint64_t round_ = 0;
  uint64_t done_since_ = 0;    // pieces since the last check
  uint64_t unsure_since_ = 0;  // ended otherwise: they may have raised the counter
  uint64_t done_ = 0, failed_ = 0, late_ = 0;
  uint64_t verified_ = 0;  // bytes
  uint64_t lost_before_ = 0;
  std::thread injector_;
  std::atomic<int64_t> injected_ns_{0};
  absl::Status injection_;
  Time noticed_ = Time(-1);
  double clock_ = 1;
  std::vector<int> before_, after_;
  std::string why_;
  std::vector<std::string> complaints_;
};

absl::Status Sender::start_target() {
  if (absl::Status s = board_.run_there("target_start"); !s.ok()) return s;
  return meet();
}

absl::Status Sender::meet() {
  const auto offer = board_.read("offer", kPatience);
  if (!offer.ok()) return offer.status();
  const std::vector<std::string> lines = absl::StrSplit(*offer, '\n');
  if (lines.size() != 4) return absl::InternalError("a strange offer");
  auto remote = RemoteRegion::decode(absl::HexStringToBytes(lines[1]));
  auto counter = RemoteCounter::decode(absl::HexStringToBytes(lines[3]));
  if (!remote.ok() || !counter.ok()) return absl::InternalError("a strange offer");
  remote_ = *remote;
  remote_offset_ = std::stoull(lines[2]);
  counter_ = *counter;
  counted_.reset();
  done_since_ = unsure_since_ = 0;
  const auto peer = worker_->connect(lines[0]);
  if (!peer.ok()) return peer.status();
  peer_ = *peer;
  return worker_->wait_until([&] { return worker_->peer_state(peer_) != PeerState::kConnecting; },
                             kPatience);
}

absl::Status Sender::start(const std::string& host) {
  auto worker = Worker::create(worker_options("sender", host));
  if (!worker.ok()) return worker.status();
  worker_ = *std::move(worker);
  auto pool = MemoryPool::create(*worker_, {.slab_bytes = kBytes});
  if (!pool.ok()) return pool.status();
  pool_ = *std::move(pool);
  const auto block = pool_->allocate(kBytes);
  if (!block.ok()) return block.status();
  block_ = *block;
  if (absl::Status s = start_target(); !s.ok()) return s;
  return lost() ? worker_->peer_status(peer_) : absl::OkStatus();
}

void Sender::look() {
  if (injected_ns_ == 0 || noticed_ >= Time(0)) return;
  const bool noticed = case_.outcome == Outcome::kLost ? lost()
                       : case_.loses_rail              ? worker_->stats().rails_lost > lost_before_
                                                       : false;
  if (!noticed) return;
  noticed_ = now() - Time(injected_ns_.load());
  clock_ = lateness_.factor();
}

bool Sender::round(Time timeout) {
  ++round_;
  std::vector<TransferId> open;
  std::array<Times, kPieces> times{};
  for (size_t piece = 0; piece < kPieces; ++piece) {
    fill_piece(block_.data + piece * kPieceBytes, piece, round_);
    times[open.size()].submitted = now();
    const auto id = worker_->submit(
        {.peer = peer_,
         .local = block_.region,
         .local_layout = Layout::contiguous(block_.offset + piece * kPieceBytes, kPieceBytes),
         .remote = remote_,
         .remote_layout = Layout::contiguous(remote_offset_ + piece * kPieceBytes, kPieceBytes),
         .counter = counter_,
         .timeout = timeout,
         .on_end = [](void* at, TransferId,
                      const absl::Status&) { *static_cast<Time*>(at) = now(); },
         .context = &times[open.size()].ended});
    if (!id.ok()) {
      if (!lost()) complain(absl::StrCat("submit: ", id.status().message()));
      continue;
    }
    open.push_back(*id);
    worker_->progress();
    look();
  }
  const Time until = now() + kPatience;
  for (size_t i = 0; i < open.size(); ++i) {
    while (!ended(*worker_->state(open[i])) && now() < until) {
      worker_->progress();
      look();
    }
    const absl::Status status = worker_->status(open[i]);
    switch (*worker_->state(open[i])) {
      case TransferState::kActive:
        complain("a transfer did not end");
        give_up();  // the worker might not end either
      case TransferState::kDone:
        ++done_, ++done_since_;
        break;
      case TransferState::kDeadline:
        ++late_, ++unsure_since_;
        noticed_ = std::max(noticed_, times[i].ended - times[i].submitted);
        clock_ = lateness_.factor();
        break;
      default:
        ++failed_, ++unsure_since_;
        why_ = std::string(status.message());
        // Aborted: it may have arrived, and nobody can tell any more.
        if (!absl::IsUnavailable(status) && !absl::IsAborted(status))
          complain(absl::StrCat("ended as ", status.ToString()));
    }
    worker_->release(open[i]).IgnoreError();
  }
  look();
  return !lost();
}

bool Sender::check() {
  std::vector<uint64_t> rounds(kPieces, round_);
  if (!worker_->notify_detached(peer_, absl::StrJoin(rounds, " ")).ok()) return !lost();
  Notification answer;
  bool answered = false;
  const Time until = now() + kPatience;
  while (!answered && !lost() && now() < until) {
    worker_->progress();
    look();
    answered = worker_->next_notification(answer);
  }
  if (lost()) return false;
  uint64_t count = 0;
  if (!answered) {
    complain("the target does not answer");
    const WorkerStats stats = worker_->stats();
    std::cerr << case_.name << ": no answer: " << worker_->explain(peer_) << "; open "
              << stats.open_transfers << ", slices moved " << stats.slices_moved << "\n";
    // Where its threads stand, for the log.
    board_.run_there(R"(head -n 99 /proc/$(<"$board/pid")/task/*/{comm,stack})").IgnoreError();
  } else if (!absl::StartsWith(answer.payload, "counter ")) {
    complain(answer.payload);
  } else {
    count = std::stoull(answer.payload.substr(8));
    // The first value after a new acceptor is where counting starts.
    const uint64_t base = counted_.value_or(count - done_since_);
    if (count < base + done_since_ || count > base + done_since_ + unsure_since_) {
      complain(absl::StrCat("the counter rose by ", count - base, ", not ", done_since_));
    }
    counted_ = count;
    done_since_ = unsure_since_ = 0;
    verified_ += kBytes;
  }
  return true;
}

// Beside the transfers: they must not wait for a shell.
void Sender::inject() {
  lost_before_ = worker_->stats().rails_lost;
  injector_ = std::thread([this] {
    const std::string there = case_.there;
    if (*case_.here != 0) injection_.Update(run_here(case_.here));
    if (there == "poweroff") {
      injection_.Update(board_.power_off_there());
    } else if (!there.empty()) {
      injection_.Update(board_.run_there(there));
    }
    lateness_.begin();
    injected_ns_ = now().count();
    if (case_.outage < Time(0)) return;
    std::this_thread::sleep_for(case_.outage);
    injection_.Update(undo());
  });
}

void Sender::finish_injection() {
  while (injected_ns_ == 0) {
    worker_->progress();
    look();
  }
  injector_.join();
  if (!injection_.ok()) complain(std::string(injection_.message()));
}

absl::Status Sender::undo() const {
  absl::Status status;
  if (*case_.undo_here != 0) status.Update(run_here(case_.undo_here));
  if (*case_.undo_there != 0) status.Update(board_.run_there(case_.undo_there));
  return status;
}

bool Sender::reaches(PeerId peer) {
  const auto id = worker_->notify(peer, "?");
  return id.ok() && worker_->wait(*id, kPatience).ok();
}

void Sender::give_up() const {
  std::cerr << case_.name << ": " << worker_->explain(peer_) << "; open "
            << worker_->stats().open_transfers << "\n";
  report();
  std::_Exit(1);
}

// Both rails carry traffic again, from whichever peer there is now.
void Sender::after() {
  const Time until = now() + kPatience;
  bool balanced = false;
  while (!balanced && now() < until) {
    const auto sent = packets_sent();
    if (!checked_round()) return complain(absl::StrCat("lost afterwards: ", why_));
    after_ = shares(sent, packets_sent());
    balanced = after_.size() == 2 && std::min(after_[0], after_[1]) >= 15;
  }
  if (!balanced) complain("one rail carries nothing afterwards");
}

void Sender::run() {
  auto sent = packets_sent();
  for (int i = 0; i < 3; ++i) {
    if (!checked_round()) return complain("lost before the fault");
  }
  before_ = shares(sent, packets_sent());
  if (before_.size() != 2 || std::min(before_[0], before_[1]) < 15) {
    complain("the rails do not share the bytes");
  }
  const bool faulty = *case_.here != 0 || *case_.there != 0;
  if (faulty && case_.before) {
    inject();
    finish_injection();
  }
  const Time until = now() + kPatience;
  bool alive = true;
  const size_t rounds = case_.pieces / kPieces;
  for (size_t i = 0; alive && now() < until; ++i) {
    if (faulty && !case_.before && i == rounds / 3) inject();
    if (case_.outcome == Outcome::kInTime && i >= rounds / 3) {
      if (i == rounds / 3) finish_injection();
      alive = round(kPieceDeadline);
    } else {
      alive = checked_round();
    }
    const bool awaited = case_.outcome == Outcome::kLost || case_.loses_rail;
    if (i + 1 >= rounds && (!awaited || noticed_ >= Time(0))) break;
  }
  if (injector_.joinable()) finish_injection();
  look();
  if ((case_.outcome == Outcome::kLost) == alive) {
    complain(alive ? "the peer was not lost" : absl::StrCat("the peer was lost: ", why_));
  }
  if (case_.outcome == Outcome::kAllDone && failed_ + late_ > 0) {
    complain(absl::StrCat(failed_ + late_, " transfers failed: ", why_));
  }
  if (std::string(case_.there) == "poweroff") return;
  if (case_.outage < Time(0)) {
    if (const absl::Status undone = undo(); !undone.ok()) complain(std::string(undone.message()));
  }
  if (!case_.same_peer_after) {
    const PeerId old = peer_;
    const absl::Status met = case_.restart ? start_target() : meet();
    if (!met.ok()) complain(absl::StrCat("not met again: ", met.message()));
    if (old == peer_ || reaches(old)) complain("the old peer is alive");
  }
  after();
}

int Sender::report() const {
  auto complaints = complaints_;
  const double predicted = case_.predicted < Time(0) ? -1 : ms(case_.predicted);
  const double allowed = (std::max(predicted, 0.0) + ms(kGrace)) * clock_;
  if (predicted >= 0 && case_.outcome != Outcome::kInTime && noticed_ < Time(0)) {
    complaints.emplace_back("never noticed");
  }
  if (predicted >= 0 && ms(noticed_) > allowed) complaints.emplace_back("noticed too late");
  std::string happened = absl::StrCat(done_, " done");
  if (failed_ > 0) absl::StrAppend(&happened, ", ", failed_, " unavailable");
  if (late_ > 0) absl::StrAppend(&happened, ", ", late_, " past their deadline");
  if (const uint64_t moved = worker_ ? worker_->stats().slices_moved : 0; moved > 0) {
    absl::StrAppend(&happened, ", ", moved, " slices moved to the other rail");
  }
  std::cout << nlohmann::json{{"case", case_.name},
                              {"injected", case_.injected},
                              {"happened", happened},
                              {"why", why_},
                              {"noticed_ms", noticed_ < Time(0) ? -1 : ms(noticed_)},
                              {"predicted_ms", predicted},
                              {"allowed_ms", allowed},
                              {"clock", clock_},
                              {"verified_bytes", verified_},
                              {"rails_before", before_},
                              {"rails_after", after_},
                              {"verdict",
                               complaints.empty() ? "ok" : absl::StrJoin(complaints, "; ")}}
                   .dump()
            << std::endl;
  return complaints.empty() ? 0 : 1;
}

}  // namespace

int run_sender(const std::string& board, const std::string& host, const Case& which) {
  Sender sender(board, which);
  if (const absl::Status status = sender.start(host); !status.ok()) {
    std::cerr << "sender: " << status << "\n";
    sender.complain(absl::StrCat("no connection: ", status.message()));
    return sender.report();
  }
  sender.run();
  return sender.report();
}

}  // namespace baton::softroce

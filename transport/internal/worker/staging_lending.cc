// Chunks that go from one worker's ring straight to the other's device.
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/base/unique_fd.h"
#include "transport/internal/staging/cut.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {
namespace {

// Limit per peer, which has one ring for each device.
constexpr auto kMostRings = 64;
// No setting allows a larger one (staging.ring_mib), and pinning fills what is none.
constexpr size_t kLargestRing = RingMarks::with_room(size_t{4096} << 20);
// From one look at a process to the next.
constexpr Time kReaderPause = std::chrono::milliseconds(1);

uint64_t name_of(PeerId peer, size_t ring) { return uint64_t{peer.index} << 32 | ring; }

// Once it has, the driver has let go of what it had begun. One that has not been waited for counts.
bool process_has_ended(uint32_t process) {
  const base::UniqueFd fd(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  if (!fd.valid()) return errno == ESRCH || errno == EINVAL;  // no process, or no number of one
  pollfd end{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return poll(&end, 1, 0) > 0;
}

}  // namespace

// Whether the peer can have our rings mapped, and knows what to do with them.
bool Staging::shows_rings(const Peer& peer) const {
  return peer.protocol >= kLendingProtocol &&
         std::any_of(peer.rails.begin(), peer.rails.end(),
                     [](const auto& state) { return state.rail->shows_files(); });
}

// For a new chunk: tells the target of our ring first; true if the target copies from it.
bool Staging::may_offer(const Op& op, const Peer& peer) {
  const TransferDescriptor& d = worker_.slots[op.id.slot].descriptor;
  if (d.op != baton::Op::kWrite || !op.far || op.near == nullptr) return false;
  const size_t number =
      static_cast<size_t>(std::find_if(rings_.begin(), rings_.end(),
                                       [&](const auto& ring) { return ring.get() == op.near; }) -
                          rings_.begin());
  const uint64_t name = name_of(op.peer, number);
  if (lent_to_.contains(name)) return true;
  if (shown_.contains(name) || !shows_rings(peer)) return false;
  shown_.insert(name);
  const RegionEntry& row = worker_.regions.entries()[op.near->region.index];
  say(op.peer, {.kind = Message::Kind::kRing,
                .room = {static_cast<uint32_t>(number), 1},
                .region = worker_.regions.describe(row)});
  return false;
}

void Staging::on_ring(Peer& peer, const Message& message) {
  if (Borrowed* from = borrowed(peer, message.region); from != nullptr) {
    from->number = message.room;
    if (from->state != Borrowed::State::kReady) return;
    say(from->peer, {.kind = Message::Kind::kBorrows, .room = from->number});
  }
}

void Staging::on_borrows(PeerId peer, const Message& message) {
  const uint64_t name = name_of(peer, message.room.index);
  if (shown_.contains(name)) lent_to_.try_emplace(name, 0);
}

// The bytes are in our ring: they stay there until the target has copied them, or it is sure that
// it will not.
void Staging::offer(Chunk& chunk) {
  const TransferDescriptor& whole = worker_.slots[chunk.parent.slot].descriptor;
  Message offer{.kind = Message::Kind::kOffer,
                .chunk = chunk.name,
                .region = whole.remote,
                .offset = chunk.near.offset,
                .bytes = chunk.end - chunk.begin,
                .urgent = whole.bytes <= kUrgentBytes};
  for (size_t i = 0; i < rings_.size(); ++i) {
    if (rings_[i].get() == chunk.near.ring) offer.room = {static_cast<uint32_t>(i), 1};
  }
  lent_to_[name_of(chunk.peer, offer.room.index)] += offer.bytes;
  runs_of(whole.remote_layout, chunk.begin, offer.bytes, offer.runs);
  chunk.near.ring->marks.lend(chunk.near.offset, chunk.name.generation);
  chunk.sent = chunk.landing = true;
  awake_until_ = worker_.clock.now() + kAwake;
  say(chunk.peer, offer);
}

void Staging::on_offer(PeerId peer, Message message) {
  const auto refuse = [&](absl::Status why) {
    const Served refused{.peer = peer, .chunk = message.chunk};
    answer(refused, std::move(why));
  };
  if (serves_[peer.index] >= kMostServed) {
    return refuse(absl::ResourceExhaustedError("too many staged chunks at a time"));
  }
  const auto from = std::find_if(borrowed_.begin(), borrowed_.end(), [&](const auto& each) {
    return each->peer == peer && each->number == message.room &&
           each->state == Borrowed::State::kReady;
  });
  if (from == borrowed_.end() || !(*from)->marks.covers(message.offset, message.bytes)) {
    return refuse(absl::InvalidArgumentError(
        "the peer offered bytes outside every staging ring that was lent to it"));
  }
  const absl::StatusOr<std::byte*> base =
      base_of(message.region, true, message.bytes, message.runs);
  if (!base.ok()) return refuse(base.status());
  if (!(*from)->marks.borrow(message.offset, message.chunk.generation, worker_.self.pid)) {
    return refuse(absl::CancelledError("the peer withdrew the bytes that it had offered"));
  }
  const size_t offset = message.offset;
  Served& served = open_served(peer, std::move(message));
  std::byte* const host = take(**from, offset, served.bytes, served.in_place);
  served.state = Served::State::kCopying;
  served.room.ring = ring_of(worker_.regions.entries()[served.region.index].place.device);
  copy(*served.room.ring, CopyDirection::kToDevice, true, served.name, served.urgent, host, *base,
       served.runs);
}

// For a read whose bytes lie in the target's ring: copies them from there. False if it cannot.
bool Staging::read_in_place(Chunk& chunk) {
  const TransferDescriptor& d = worker_.slots[chunk.parent.slot].descriptor;
  if (d.op != baton::Op::kRead || chunk.far.generation == 0 || chunk.near.ring == nullptr) {
    return false;
  }
  Peer* const peer = worker_.find_peer(chunk.peer);
  if (peer == nullptr || !shows_rings(*peer)) return false;
  Borrowed* const from = borrowed(*peer, chunk.far_ring);
  if (from == nullptr || from->state != Borrowed::State::kReady ||
      !from->marks.covers(chunk.far_offset, chunk.end - chunk.begin) ||
      !from->marks.borrow(chunk.far_offset, chunk.far.generation, worker_.self.pid)) {
    return false;
  }
  chunk.sent = true;
  start_copy(chunk, *op_of(chunk), CopyDirection::kToDevice,
             take(*from, chunk.far_offset, chunk.end - chunk.begin, chunk.in_place));
  return true;
}

// The peer's ring, if it is mapped here, or is about to be. Null: it has too many.
Staging::Borrowed* Staging::borrowed(Peer& peer, const RemoteRegion& ring) {
  ptrdiff_t rings = 0;
  for (const auto& from : borrowed_) {
    if (from->peer != peer.id()) continue;
    if (from->region.index == ring.index && from->region.generation == ring.generation) {
      return from.get();
    }
    ++rings;
  }
  if (rings >= kMostRings) return nullptr;
  borrowed_.push_back(std::make_unique<Borrowed>());
  borrowed_.back()->name = ++borrowed_names_;
  borrowed_.back()->peer = peer.id();
  borrowed_.back()->region = ring;
  borrowing_ = true;
  return borrowed_.back().get();
}

// Unavailable: not yet.
absl::Status Staging::begin_borrowing(Borrowed& from) {
  const Peer* const peer = worker_.find_peer(from.peer);
  if (peer == nullptr) return absl::NotFoundError("the peer is gone");
  if (rings_.empty()) return absl::FailedPreconditionError("no device to copy to");
  absl::StatusOr<RemoteView> view = worker_.view(*peer, from.region);
  if (!view.ok()) return view.status();
  // The engine and the marks need what a reader of the view does not.
  auto* const data = const_cast<std::byte*>(view->data);
  from.view = *std::move(view);
  from.marks = RingMarks(data, from.view.size);
  if (from.marks.room() == 0 || from.view.size > kLargestRing) {
    return absl::InvalidArgumentError("no ring");
  }
  from.state = Borrowed::State::kPinning;
  pinner_.pin(from.name, [&copies = *rings_.front()->copies, data, view = from.view] {
    return copies.pin({data, view.size});
  });
  return absl::OkStatus();
}

bool Staging::tend_borrowed() {
  bool any = false;
  for (Pinner::Done& done : pinner_.take()) {
    any = true;
    const auto found = std::find_if(borrowed_.begin(), borrowed_.end(),
                                    [&](const auto& from) { return from->name == done.job; });
    Borrowed& from = **found;  // it stays for as long as it is being pinned
    from.state = done.pin.ok() ? Borrowed::State::kReady : Borrowed::State::kRefused;
    if (!done.pin.ok()) continue;
    from.pin = *std::move(done.pin);
    if (from.number.generation != 0) {
      say(from.peer, {.kind = Message::Kind::kBorrows, .room = from.number});
    }
  }
  borrowing_ = false;
  std::erase_if(borrowed_, [&](const std::unique_ptr<Borrowed>& from) {
    if (from->state == Borrowed::State::kWanted) {
      const absl::Status status = begin_borrowing(*from);
      if (!status.ok() && !absl::IsUnavailable(status)) from->state = Borrowed::State::kRefused;
    }
    const bool pinning = from->state == Borrowed::State::kPinning;
    const bool over = from->gone && from->users == 0 && !pinning;
    borrowing_ |= pinning || from->state == Borrowed::State::kWanted || (from->gone && !over);
    if (!over) return false;
    if (from->pin != nullptr) pinner_.let_go(std::move(from->pin), std::move(from->view.keep));
    any = true;
    return true;
  });
  return any;
}

std::byte* Staging::take(Borrowed& from, size_t offset, size_t bytes, Borrow& borrow) {
  ++from.users;
  from.bytes += bytes;
  borrow = {&from, offset};
  return from.marks.ring() + offset;
}

// No engine of ours reads there any more.
void Staging::give_back(Borrow& borrow) {
  awake_until_ = worker_.clock.now() + kAwake;
  borrow.from->marks.give_back(borrow.offset);
  --borrow.from->users;
  borrow = {};
}

// Room of ours, of which a part may have been lent.
void Staging::give_back(Room& room, RingSpace& space, bool lent) {
  if (!lent || room.ring->marks.take_back(room.offset)) {
    space.give_back(room.offset, room.bytes);
  } else {
    left_behind_.push_back({room, &space});
  }
  room = {};
}

bool Staging::take_back() {
  const Time now = worker_.clock.now();
  const bool look = now >= look_at_readers_;
  if (look) look_at_readers_ = now + kReaderPause;
  const size_t before = left_behind_.size();
  std::erase_if(left_behind_, [&](LeftBehind& left) {
    const RingMarks& marks = left.room.ring->marks;
    if (!marks.take_back(left.room.offset)) {
      if (!look || !process_has_ended(marks.reader(left.room.offset))) return false;
      marks.give_back(left.room.offset);
    }
    left.space->give_back(left.room.offset, left.room.bytes);
    due_ = true;
    return true;
  });
  return left_behind_.size() != before;
}

std::string Staging::explain_lending(PeerId peer) const {
  std::string out;
  for (const auto& from : borrowed_) {
    if (from->peer != peer || from->gone || from->state != Borrowed::State::kReady) continue;
    absl::StrAppend(&out, "; copied straight from the peer's ring: ", from->bytes, " bytes");
  }
  for (const auto& [name, bytes] : lent_to_) {
    if (name >> 32 != peer.index) continue;
    absl::StrAppend(&out, "; by the peer straight from ours: ", bytes, " bytes");
  }
  return out;
}

Time Staging::next_timer() const { return left_behind_.empty() ? kNever : look_at_readers_; }

void Staging::lent_peer_down(PeerId peer) {
  const auto of_peer = [&](uint64_t name) { return name >> 32 == peer.index; };
  absl::erase_if(shown_, of_peer);
  absl::erase_if(lent_to_, [&](const auto& lent) { return of_peer(lent.first); });
  for (const auto& from : borrowed_) {
    if (from->peer != peer) continue;
    from->gone = borrowing_ = true;
  }
}

}  // namespace baton::internal

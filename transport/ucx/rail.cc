// A ucx rail's life: coming up, taking slices, aborting, watching for a stall, going down.
#include "transport/ucx/rail.h"

#include <openssl/rand.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::ucx {
namespace {

uint64_t random_token() {
  uint64_t token = 0;
  RAND_bytes(reinterpret_cast<unsigned char*>(&token), sizeof(token));
  return token;
}

}  // namespace

UcxRail::UcxRail(std::shared_ptr<UcxShared> shared, std::unique_ptr<tcp::MessageStream> channel,
                 HelloInfo peer)
    : shared_(std::move(shared)), channel_(std::move(channel)), peer_info_(std::move(peer)) {
  peer_ =
      absl::StrCat(peer_info_.name.empty() ? "?" : peer_info_.name, " (", channel_->peer(), ")");
  properties_ = {.provider = "ucx",
                 .route = absl::StrFormat("ucx %s (%s)", channel_->peer(), shared_->transports),
                 .bytes_per_second = 1e9,
                 .slice_bytes = shared_->slice_bytes,
                 .depth = kDepth};
  auto& rails = shared_->rails;
  const auto free = std::find(rails.begin(), rails.end(), nullptr);
  inbound_ = {static_cast<uint32_t>(free - rails.begin()), random_token()};
  if (free == rails.end()) {
    rails.push_back(this);
  } else {
    *free = this;
  }
  pieces_.reserve(kMaxPieces);
}

UcxRail::~UcxRail() { leave(); }

// Stops hearing the peer at once: what of its messages is still on the way is for nobody.
void UcxRail::leave() {
  if (channel_ == nullptr) return;
  channel_.reset();
  shared_->rails[inbound_.rail] = nullptr;
  if (endpoint_ != nullptr) shared_->engine->release(endpoint_);
  endpoint_ = nullptr;
}

std::string UcxRail::introduction() const {
  return Introduction{inbound_, shared_->engine->address()}.encode();
}

absl::Status UcxRail::introduced(std::string_view words) {
  const auto peer = Introduction::decode(words);
  if (!peer.has_value()) return lost("it introduced itself in no known way");
  outbound_ = peer->to;
  auto endpoint = shared_->engine->connect(peer->address);
  if (!endpoint.ok()) return endpoint.status();
  endpoint_ = *endpoint;
  return absl::OkStatus();
}

bool UcxRail::post(const Slice& slice, EventSink& sink) {
  if (closed_ || failing_) return false;
  if (slice.begin == slice.end && slice.transfer->op == Op::kRead) {
    sink.slice_done(*this, slice.transfer->id, slice.index, absl::OkStatus());
    return true;
  }
  Slot* slot = slots_.take(slice);
  if (slot == nullptr) return false;
  slot->order = ++order_;
  return true;
}

void UcxRail::abort(TransferId transfer, EventSink& sink) {
  for (Slot& slot : slots_) {
    if (closed_) return;
    if (!slot.live || slot.aborted || !(slot.id == transfer)) continue;
    if (slot.op == Op::kWrite && slot.begun) {
      // What is on its way may land until the target has spoken: wait for that, for a while.
      slot.aborted = true;
      last_moved_ = shared_->context.clock.now();
      next_check_ = Time::zero();
      continue;
    }
    // What still comes of a read finds no slot to land by.
    if (slot.reads_open > 0) {
      send_control({.type = tcp::FrameType::kCancelRead, .transfer = slot.id, .slice = slot.slice});
    }
    report(slot, absl::CancelledError("aborted"), sink);
  }
}

void UcxRail::close(absl::Status why, EventSink& sink) {
  fail(std::move(why));
  finish(sink);
}

void UcxRail::fail(absl::Status why) {
  if (failing_) return;
  failing_ = true;
  failure_ = std::move(why);
}

absl::Status UcxRail::lost(std::string_view why) const {
  return absl::UnavailableError(absl::StrCat("peer ", peer_, " over ucx: ", std::string(why)));
}

absl::Status UcxRail::hostile(std::string_view why) const {
  return lost(absl::StrCat("hostile or damaged message: ", std::string(why)));
}

void UcxRail::finish(EventSink& sink) {
  if (closed_) return;
  closed_ = true;
  next_check_ = kNever;
  leave();
  if (failure_.ok()) failure_ = absl::CancelledError("closed");
  for (Slot& slot : slots_) {
    if (slot.live) report(slot, failure_, sink);
  }
  sink.rail_down(*this, failure_);
}

bool UcxRail::check_channel(EventSink& sink) {
  if (closed_) return false;
  bool any = false;
  while (const auto words = channel_->next()) {
    any = true;  // "ready", overtaken by what it announced, is empty
    if (!words->empty()) fail(hostile("words on the connection beside UCX"));
  }
  if (!channel_->open()) fail(lost(std::string(channel_->why().message())));
  if (failing_) finish(sink);
  return any || closed_;
}

bool UcxRail::advance(EventSink& sink) {
  if (closed_ || endpoint_ == nullptr) return false;
  if (!failing_ && !endpoint_->failure.ok()) {
    fail(lost(std::string(endpoint_->failure.message())));
  }
  const bool any = !failing_ && compose();
  if (failing_) finish(sink);
  return any || closed_;
}

bool UcxRail::runnable() const {
  if (closed_ || endpoint_ == nullptr) return false;
  if (failing_ || !endpoint_->failure.ok()) return true;
  const bool room = endpoint_->under_way < kWindow;
  return std::any_of(slots_.begin(), slots_.end(),
                     [&](const Slot& slot) {
                       return (room && slot.unsaid()) ||
                              (reads_open_ < kMaxReads && slot.unasked());
                     }) ||
         (room && jobs_live_ > 0);
}

// Whether anything is under way in either direction that needs the peer to move on.
bool UcxRail::waiting() const {
  return slots_.live() > 0 || reads_open_ > 0 || jobs_live_ > 0 ||
         (endpoint_ != nullptr && endpoint_->under_way > 0) ||
         std::any_of(incoming_.begin(), incoming_.end(), [](const Incoming& i) { return i.live; });
}

void UcxRail::check_timers(Time now, EventSink& sink) {
  if (closed_ || endpoint_ == nullptr) return;
  if (!waiting()) {
    next_check_ = kNever;
    return;
  }
  const bool fresh = next_check_ == kNever;
  if (!fresh && now < next_check_) return;
  const uint64_t moved = moved_ + endpoint_->completed;
  if (fresh || moved != seen_moved_) {
    seen_moved_ = moved;
    last_moved_ = now;
  }
  const Time limit = slots_.aborting() ? std::min(kAbortGrace, shared_->stall) : shared_->stall;
  if (now - last_moved_ >= limit) {
    endpoint_->silent = true;
    fail(lost(absl::StrFormat(
        "nothing moved for %.1f s with %u slices open: it is stopped, or the network between is "
        "down",
        std::chrono::duration<double>(now - last_moved_).count(), slots_.live())));
    finish(sink);
    return;
  }
  next_check_ = now + std::max<Time>(limit / 4, std::chrono::milliseconds(1));
}

}  // namespace baton::ucx

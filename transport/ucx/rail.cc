// A ucx rail's life: coming up, taking slices, aborting, watching for a stall, going down.
#include "transport/ucx/rail.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/ucx/provider.h"

namespace baton::ucx {
namespace {

std::string said(net::Protection protection) {
  return protection == net::Protection::kHeads ? "" : absl::StrCat(", ", net::name(protection));
}

}  // namespace

UcxRail::UcxRail(std::shared_ptr<UcxShared> shared, std::unique_ptr<net::MessageStream> channel,
                 const net::LinkKeys& keys, HelloInfo peer)
    : FramedRail(shared->context, shared->stall,
                 absl::StrCat(peer.name.empty() ? "?" : peer.name, " (", channel->peer(), ")"),
                 {.provider = "ucx",
                  .route = absl::StrFormat("ucx %s (%s%s)", channel->peer(), shared->transports,
                                           said(keys.protection)),
                  .bytes_per_second = 1e9,
                  .slice_bytes = shared->slice_bytes,
                  .depth = kDepth}),
      shared_(std::move(shared)),
      channel_(std::move(channel)),
      peer_info_(std::move(peer)),
      sealer_(keys.send, keys.protection),
      opener_(keys.receive, keys.protection) {
  auto& rails = shared_->rails;
  const auto free = std::find(rails.begin(), rails.end(), nullptr);
  here_ = static_cast<uint32_t>(free - rails.begin());
  if (free == rails.end()) {
    rails.push_back(this);
  } else {
    *free = this;
  }
  ++shared_->live;
  channel_->owner = this;
  pieces_.reserve(kMaxPieces);
}

UcxRail::~UcxRail() { leave(); }

void UcxRail::activate() {
  if (!announced || closed_ || std::exchange(active_, true)) return;
  shared_->active.push_back(this);
}

// Stops hearing the peer at once: what of its messages is still on the way is for no receiver.
void UcxRail::leave() {
  if (channel_ == nullptr) return;
  channel_.reset();
  shared_->rails[here_] = nullptr;
  --shared_->live;
  if (active_) {
    std::vector<UcxRail*>& active = shared_->active;
    std::replace(active.begin(), active.end(), this, static_cast<UcxRail*>(nullptr));
  }
  if (endpoint_ != nullptr) shared_->engine->release(endpoint_);
  endpoint_ = nullptr;
}

std::string UcxRail::introduction() const {
  return Introduction{here_, shared_->engine->address()}.encode();
}

absl::Status UcxRail::introduced(std::string_view words) {
  const auto peer = Introduction::decode(words);
  if (!peer.has_value()) return lost("it introduced itself in an unknown form");
  there_ = peer->rail;
  auto endpoint = shared_->engine->connect(peer->address);
  if (!endpoint.ok()) return endpoint.status();
  endpoint_ = *endpoint;
  return absl::OkStatus();
}

// Data of this read that still arrives finds no slot and is dropped.
void UcxRail::take_back(Slot& slot) {
  if (slot.reads_open == 0) return;
  send_control({.type = framed::FrameType::kCancelRead, .transfer = slot.id, .slice = slot.slice},
               {});
}

void UcxRail::say_goodbye(std::string_view why) {
  if (channel_ == nullptr) return;
  std::string text(framed::kHeaderBytes, '\0');
  const std::string_view reason = why.substr(0, framed::kMaxText);
  framed::encode_header(
      {.type = framed::FrameType::kGoodbye, .text = static_cast<uint32_t>(reason.size())},
      text.data());
  channel_->send(text.append(reason));
}

void UcxRail::hostile(std::string_view why) {
  FramedRail::hostile(absl::StrCat("hostile or damaged message: ", std::string(why)));
}

// "ready", overtaken by what it announced, is empty; else there is nothing to say but goodbye.
void UcxRail::on_words(std::string_view words) {
  if (words.empty()) return;
  const auto frame = framed::decode_header(words.substr(0, framed::kHeaderBytes));
  if (!frame.ok() || frame->type != framed::FrameType::kGoodbye ||
      words.size() != framed::kHeaderBytes + frame->text) {
    return hostile("a message on the connection beside UCX");
  }
  on_goodbye(*frame, words.substr(framed::kHeaderBytes));
}

bool UcxRail::check_channel(EventSink& sink) {
  if (closed_) return false;
  bool any = false;
  while (const auto words = channel_->next()) {
    any = true;
    on_words(*words);
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
                       return (room && unsaid(slot)) || (reads_open_ < kMaxReads && unasked(slot));
                     }) ||
         (room && jobs_live_ > 0);
}

bool UcxRail::waiting() const {
  return slots_.live() > 0 || reads_open_ > 0 || jobs_live_ > 0 ||
         (endpoint_ != nullptr && endpoint_->under_way > 0) ||
         std::any_of(incoming_.begin(), incoming_.end(), [](const Incoming& i) { return i.live; });
}

uint64_t UcxRail::moved() const { return received_ + endpoint_->completed; }

// From an authenticated peer to a rail. After the handshake, on the same connection:
//
//   client  -> server   introduction: where its rail is found in UCX
//   server  -> client   introduction; from here on the client may send through UCX
//   client  -> server   ready (an empty message); from here on the server may

void UcxProvider::connect(const ConnectRequest& request) {
  const absl::Status status = capabilities_.available ? start_engine() : absl::OkStatus();
  if (!status.ok()) return acceptor_.refuse(request, status);
  AcceptorProvider::connect(request);
}

// Introduces the two rails to each other.
void UcxProvider::met(const net::Link& link, HelloInfo peer, std::unique_ptr<Dial> dial) {
  auto channel = std::make_unique<net::MessageStream>(link, *shared_->poller, UcxRail::kChannel);
  absl::Status status = start_engine();
  status.Update(channel->why());
  if (!status.ok()) {
    if (dial != nullptr) acceptor_.try_next(std::move(dial), status);
    return;
  }
  Joining joining;
  joining.rail = std::make_unique<UcxRail>(shared_, std::move(channel), link.keys, std::move(peer));
  joining.dial = std::move(dial);
  joining.deadline = shared_->context.clock.now() + patience_;
  if (joining.dial != nullptr) joining.rail->channel().send(joining.rail->introduction());
  joining_.push_back(std::move(joining));
}

bool UcxProvider::advance_joining(EventSink& sink) {
  bool any = false;
  for (size_t i = 0; i < joining_.size();) {
    const absl::StatusOr<bool> joined = advance(joining_[i]);
    if (joined.ok() && !*joined) {
      ++i;
      continue;
    }
    any = true;
    Joining joining = std::move(joining_[i]);
    joining_.erase(joining_.begin() + static_cast<ptrdiff_t>(i));
    if (joined.ok()) {
      announce(std::move(joining), sink);
    } else if (joining.dial != nullptr) {
      joining.rail.reset();
      acceptor_.try_next(std::move(joining.dial), joined.status());
    }
  }
  return any;
}

// True once the rail can be used.
absl::StatusOr<bool> UcxProvider::advance(Joining& joining) {
  net::MessageStream& channel = joining.rail->channel();
  const auto words = channel.next();
  if (!words.has_value()) {
    if (!channel.open()) return channel.why();
    if (shared_->context.clock.now() < joining.deadline) return false;
    return absl::UnavailableError("it did not introduce itself in time (ucx.handshake_ms)");
  }
  if (joining.introduced) {
    if (words->empty()) return true;
    return absl::UnavailableError("it introduced itself twice");
  }
  if (absl::Status status = joining.rail->introduced(*words); !status.ok()) return status;
  joining.introduced = true;
  const bool client = joining.dial != nullptr;
  channel.send(client ? std::string() : joining.rail->introduction());
  return client;
}

void UcxProvider::announce(Joining joining, EventSink& sink) {
  UcxRail& rail = *joining.rail;
  rail.announced = true;
  rail.activate();
  if (joining.dial != nullptr) {
    sink.connected(joining.dial->session, rail.peer(), std::move(joining.rail));
  } else {
    sink.accepted(rail.peer(), std::move(joining.rail));
  }
}

}  // namespace baton::ucx

// The Acceptor: connections dialled and accepted, authenticated, and handed to the provider.
#include "transport/net/acceptor.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "transport/address.h"
#include "transport/net/interfaces.h"

namespace baton::net {

namespace {

// A peer's interface names mean nothing on this host.
std::string without_scope(std::string address) {
  const size_t scope = address.find('%');
  const size_t end = address.find(']');
  if (scope < end && end != std::string::npos) address.erase(scope, end - scope);
  return address;
}

}  // namespace

Acceptor::Acceptor(const ProviderContext& context, std::string provider, Met met)
    : context_(context), provider_(std::move(provider)), met_(std::move(met)) {}

Acceptor::~Acceptor() {
  if (listener_ < 0) return;
  poller_->remove(listener_);
  ::close(listener_);
}

void Acceptor::open(Poller& poller, Options options) {
  poller_ = &poller;
  options_ = std::move(options);
}

absl::StatusOr<std::string> Acceptor::listen() {
  auto fd = listen_on(context_.listen_host, options_.port, options_.sockets);
  if (!fd.ok()) return fd.status();
  listener_ = *fd;
  absl::Status status = poller_->add(listener_, EPOLLIN, listener_watch_);
  if (!status.ok()) return status;
  return advertised_as(context_.advertise, listener_, !options_.advertised_ports);
}

uint16_t Acceptor::port() const { return listener_ < 0 ? uint16_t{0} : local_of(listener_).port(); }

void Acceptor::connect(const ConnectRequest& request, uint16_t rails) {
  auto dial = std::make_unique<Dial>();
  dial->session = request.session;
  dial->resume = request.resume;
  dial->link = link_number();
  dial->expected = request.expected;
  dial->rails = rails;
  dial->address = request.address;
  const auto called = literal(request.called);
  const Endpoint* const answered = called.ok() ? &called->front() : nullptr;
  for (const auto one : absl::StrSplit(request.address, ',')) {
    auto endpoints = literal(without_scope(std::string(one)));
    if (!endpoints.ok()) {
      dial->note(endpoints.status());
      continue;
    }
    for (const Endpoint& each : *endpoints) {
      const std::vector<Endpoint> here = on_interfaces(each, answered);
      dial->endpoints.insert(dial->endpoints.end(), here.begin(), here.end());
    }
  }
  if (answered != nullptr) dial->answered_at(*answered);
  if (const auto met = met_at_.find(dial->expected.uid.bytes);
      dial->resume != Resume::kNew && met != met_at_.end()) {
    dial->met_at(met->second);
  }
  start(std::move(dial));
}

void Acceptor::refuse(const ConnectRequest& request, const absl::Status& why) {
  auto dial = std::make_unique<Dial>();
  dial->session = request.session;
  dial->address = request.address;
  dial->note(why);
  failed_.push_back(std::move(dial));
}

void Acceptor::connect_another(const Dial& first, const HelloInfo& peer, uint16_t rail,
                               std::shared_ptr<void> owner, std::vector<Endpoint> endpoints,
                               bool full_only) {
  auto dial = std::make_unique<Dial>();
  dial->session = first.session;
  dial->resume = first.resume;
  dial->link = link_number();
  dial->expected = peer;
  dial->rail = rail;
  dial->rails = first.rails;
  dial->owner = std::move(owner);
  dial->address = first.address;
  dial->endpoints = std::move(endpoints);
  dial->full_only = full_only;
  if (dial->endpoints.empty()) dial->endpoints = {first.endpoints[first.next - 1]};
  start(std::move(dial));
}

absl::Status Acceptor::query(uint64_t session, const std::string& addresses) {
  auto endpoints = literal(addresses);
  if (!endpoints.ok()) return endpoints.status();
  auto dial = std::make_unique<Dial>();
  dial->session = session;
  dial->purpose = Handshake::Purpose::kQuery;
  dial->address = addresses;
  dial->endpoints = *std::move(endpoints);
  start(std::move(dial));
  return absl::OkStatus();
}

void Acceptor::try_next(std::unique_ptr<Dial> dial, const absl::Status& why) {
  dial->note(why);
  start(std::move(dial));
}

std::unique_ptr<HandshakeConnection> Acceptor::start_handshake(int fd, Handshake::Role role,
                                                               const Dial* dial) {
  HelloInfo self = context_.self;
  if (dial != nullptr) {
    self.session = dial->session;
    self.resume = dial->resume;
    self.link = dial->link;
    self.rail = dial->rail;
    self.rails = dial->rails;
  }
  if (options_.extra) self.extra = options_.extra();
  self.address = worker_address_;
  return std::make_unique<HandshakeConnection>(
      fd, *poller_, role, context_.key, std::move(self),
      Handshake::Options{.purpose = dial != nullptr ? dial->purpose : Handshake::Purpose::kRail,
                         .offers = options_.offers,
                         .needs = options_.needs},
      context_.clock.now() + options_.patience, &worker_address_);
}

// Tries the next endpoint; with none left the dial has failed, which progress() will report.
void Acceptor::start(std::unique_ptr<Dial> dial) {
  const Time now = context_.clock.now();
  while (dial->advance(now, options_.patience)) {
    auto fd = start_connect(dial->endpoints[dial->next - 1], options_.sockets, dial->segment());
    if (!fd.ok()) {
      dial->note(fd.status());
      continue;
    }
    auto handshake = start_handshake(*fd, Handshake::Role::kClient, dial.get());
    if (options_.large_packets != LargePackets::kNotLookedAt ||
        dial->purpose == Handshake::Purpose::kQuery) {
      handshake->fill_a_packet();
    }
    const Time silent_until = dial->patience_ends(now, options_.patience);
    calls_.push_back({std::move(handshake), std::move(dial), {}, silent_until});
    return;
  }
  failed_.push_back(std::move(dial));
}

// Calls the same endpoint again if it had no room for the call. Not for calls with an owner: that
// one redials by itself, with pauses.
bool Acceptor::call_again(Call& call) {
  if (call.dial->owner != nullptr) return false;
  if (!call.handshake->turned_away() || ++call.dial->turned_away >= kCalls) {
    call.dial->turned_away = 0;
    return false;
  }
  --call.dial->next;
  start(std::move(call.dial));
  return true;
}

void Acceptor::give_up(const Dial& dial, EventSink& sink) const {
  if (dial.owner != nullptr && options_.another_failed) return options_.another_failed(dial);
  if (dial.rail > 0) return;
  const absl::StatusCode verdict = dial.verdict();
  const bool unanswered = dial.next > 0 && (verdict == absl::StatusCode::kUnavailable ||
                                            verdict == absl::StatusCode::kNotFound);
  absl::Status why(
      verdict,
      absl::StrCat("connecting to ", dial.address, " over ", provider_, " failed", dial.errors,
                   unanswered
                       ? "; is a worker listening there, and does every firewall let it through?"
                       : ""));
  if (dial.purpose == Handshake::Purpose::kQuery) {
    sink.resolved(dial.session, std::move(why), "");
  } else {
    sink.connect_failed(dial.session, std::move(why));
  }
}

void Acceptor::accept_some(EventSink& sink) {
  constexpr int kAtATime = 16;
  listener_watch_.ready = 0;
  for (int i = 0; i < kAtATime; ++i) {
    Endpoint from;
    from.size = sizeof from.storage;
    const int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&from.storage), &from.size,
                             SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EAGAIN) return;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // No descriptor, no memory: the listener stays readable, so look away for a moment.
      poller_->remove(listener_);
      look_again_ = context_.clock.now() + kLookAway;
      return;
    }
    make_room(sink);
    calls_.push_back(
        {start_handshake(fd, Handshake::Role::kServer, nullptr), nullptr, from, kNever});
  }
}

void Acceptor::refused(const Call& caller, const absl::Status& why, EventSink& sink) const {
  sink.handshake_refused(absl::StrCat(provider_, " ", caller.from.text()), why);
}

void Acceptor::make_room(EventSink& sink) {
  std::vector<size_t> callers;
  std::vector<Caller> waiting;
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].dial != nullptr) continue;
    callers.push_back(i);
    waiting.push_back({&calls_[i].from, calls_[i].handshake->names_our_key()});
  }
  if (callers.size() < kMaxHalfOpen) return;
  const auto victim = calls_.begin() + static_cast<ptrdiff_t>(callers[caller_to_drop(waiting)]);
  const Call crowded_out = std::move(*victim);
  calls_.erase(victim);
  refused(crowded_out,
          absl::ResourceExhaustedError(absl::StrCat("dropped for a new caller: ", kMaxHalfOpen,
                                                    " have not proved themselves yet")),
          sink);
}

bool Acceptor::advance_calls(EventSink& sink) {
  bool any = false;
  const Time now = context_.clock.now();
  for (size_t i = 0; i < calls_.size();) {
    using State = HandshakeConnection::State;
    HandshakeConnection& handshake = *calls_[i].handshake;
    const bool look = handshake.ready != 0 || !handshake.error().ok();
    State state = look ? handshake.advance() : State::kUnderway;
    absl::Status why = handshake.error();
    const bool silent = handshake.connecting() && now >= calls_[i].silent_until;
    Time& full_until = calls_[i].full_until;
    if (const auto full = handshake.full_packet();
        full != calls_[i].full || (now >= full_until && !handshake.full_packet_is_lost())) {
      calls_[i].full = full;
      const bool awaited = full != HandshakeConnection::FullPacket::kNotAwaited;
      full_until = awaited ? now + options_.patience / 4 : kNever;
    }
    if (state == State::kUnderway && now >= full_until) {
      state = State::kFailed;
      Dial& dial = *calls_[i].dial;
      if (options_.large_packets == LargePackets::kOrSmallSegments ||
          dial.purpose == Handshake::Purpose::kQuery) {
        dial.narrow();
      }
      why = absl::UnavailableError(absl::StrFormat(
          "it answers, but not to a message of %d bytes within %g s (a quarter of %s): large "
          "packets get lost; set both hosts' interfaces to the MTU of the path between them",
          handshake.padding(), seconds_of(options_.patience / 4), options_.patience_setting));
    }
    if (state == State::kUnderway && (silent || now >= handshake.deadline())) {
      state = State::kFailed;
      if (silent) calls_[i].dial->silent();
      why = absl::UnavailableError(absl::StrFormat(
          "no answer within %g s (%s%s)", seconds_of(options_.patience / (silent ? 4 : 1)),
          silent ? "a quarter of " : "", options_.patience_setting));
    }
    if (state == State::kUnderway) {
      ++i;
      continue;
    }
    any = true;
    Call call = std::move(calls_[i]);
    calls_.erase(calls_.begin() + static_cast<ptrdiff_t>(i));
    if (state == State::kDone) {
      call_done(std::move(call), sink);
    } else if (call.dial == nullptr) {
      refused(call, why, sink);
    } else if (!call_again(call)) {
      call.handshake.reset();
      try_next(std::move(call.dial), why);
    }
  }
  return any;
}

void Acceptor::call_done(Call call, EventSink& sink) {
  HandshakeConnection& handshake = *call.handshake;
  Dial* const dial = call.dial.get();
  if (handshake.purpose() == Handshake::Purpose::kQuery) {
    if (dial != nullptr) {
      sink.resolved(dial->session, handshake.answer(), dial->endpoints[dial->next - 1].text());
    }
    return;
  }
  HelloInfo peer = handshake.peer();
  if (dial != nullptr) {
    if (dial->expected.uid != WorkerUid{} && peer.uid != dial->expected.uid) {
      return try_next(
          std::move(call.dial),
          absl::FailedPreconditionError(absl::StrCat(
              "another worker answers there (", peer.uid.hex(), " instead of ",
              dial->expected.uid.hex(), "): if it was restarted, ask for its address again")));
    }
    peer.session = dial->session;
    peer.resume = dial->resume;
    peer.link = dial->link;
    peer.rail = dial->rail;
    peer.rails = dial->rails;
    dial->met();
  }
  met_at(peer.uid, dial != nullptr ? dial->endpoints[dial->next - 1] : call.from);
  met_({handshake.take_fd(), handshake.keys()}, std::move(peer), std::move(call.dial), sink);
}

void Acceptor::met_at(const WorkerUid& peer, const Endpoint& where) {
  if (met_at_.size() >= kMaxMet) met_at_.clear();  // of most no caller will ask
  met_at_[peer.bytes] = where;
}

bool Acceptor::progress(EventSink& sink) {
  bool any = false;
  while (!failed_.empty()) {
    const auto dial = std::move(failed_.back());
    failed_.pop_back();
    give_up(*dial, sink);
    any = true;
  }
  if (listener_watch_.ready != 0) accept_some(sink);
  if (!calls_.empty()) any |= advance_calls(sink);
  if (look_again_ != kNever && context_.clock.now() >= look_again_) {
    const bool looks = poller_->add(listener_, EPOLLIN, listener_watch_).ok();
    look_again_ = looks ? kNever : context_.clock.now() + kLookAway;
  }
  return any;
}

Time Acceptor::next_timer() const {
  Time next = look_again_;
  for (const Call& call : calls_) {
    next = std::min(next, call.handshake->deadline());
    if (call.handshake->connecting()) next = std::min(next, call.silent_until);
    next = std::min(next, call.full_until);
  }
  return next;
}

absl::Status reachable(const std::string& addresses, std::string_view host_id,
                       std::string_view here) {
  bool elsewhere = !host_id.empty() && !same_network(host_id, here);
  for (const auto one : absl::StrSplit(addresses, ',')) {
    auto parts = split_host_port(std::string(one));
    if (!parts.ok()) return parts.status();
    if (!loopback_host(parts->first)) elsewhere = false;
  }
  if (!elsewhere) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the peer has no address for other machines (", addresses,
                   "): start it with a listen_host that others can reach (\"*\" for every "
                   "interface), or set `advertise` to an address that they reach; link-local "
                   "addresses (fe80::*, 169.254.*) are not passed on"));
}

size_t caller_to_drop(const std::vector<Caller>& callers) {
  size_t oldest = 0;  // of the host with the most
  ptrdiff_t most = 0;
  for (size_t i = 0; i < callers.size(); ++i) {
    const auto calls =
        std::count_if(callers.begin() + static_cast<ptrdiff_t>(i), callers.end(),
                      [&](const Caller& other) { return other.from->same_host(*callers[i].from); });
    if (calls <= most) continue;
    most = calls;
    oldest = i;
  }
  for (size_t i = oldest; i < callers.size(); ++i) {
    if (!callers[i].names_our_key && callers[i].from->same_host(*callers[oldest].from)) return i;
  }
  return oldest;
}

}  // namespace baton::net

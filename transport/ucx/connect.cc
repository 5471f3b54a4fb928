// Listening and dialling: from a socket to an authenticated peer to a rail.
//
//   client  -> server   handshake (transport/handshake.h), over TCP
//   client  -> server   introduction: where its rail is found in UCX
//   server  -> client   introduction; from here on the client may send through UCX
//   client  -> server   ready (an empty message); from here on the server may
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "transport/ucx/provider.h"

namespace baton::ucx {

void UcxProvider::connect(const ConnectRequest& request) {
  auto dial = std::make_unique<Dial>();
  dial->session = request.session;
  dial->expected = request.expected;
  dial->address = request.address;
  if (!capabilities_.available)
    return failed(std::move(dial), absl::UnavailableError(capabilities_.detail));
  if (absl::Status status = start_engine(); !status.ok()) return failed(std::move(dial), status);
  for (const auto one : absl::StrSplit(request.address, ',')) {
    auto endpoints = tcp::resolve(std::string(one));
    if (!endpoints.ok()) {
      absl::StrAppend(&dial->errors, "; ", endpoints.status().message());
      continue;
    }
    dial->endpoints.insert(dial->endpoints.end(), endpoints->begin(), endpoints->end());
  }
  start(std::move(dial));
}

absl::Status UcxProvider::query(uint64_t session, const std::string& host_port) {
  if (!capabilities_.available) return absl::FailedPreconditionError(capabilities_.detail);
  auto endpoints = tcp::resolve(host_port);
  if (!endpoints.ok()) return endpoints.status();
  auto dial = std::make_unique<Dial>();
  dial->session = session;
  dial->purpose = Handshake::Purpose::kQuery;
  dial->address = host_port;
  dial->endpoints = *std::move(endpoints);
  start(std::move(dial));
  return absl::OkStatus();
}

// Tries the next endpoint; with none left the dial has failed, which progress() will report.
void UcxProvider::start(std::unique_ptr<Dial> dial) {
  while (dial->next < dial->endpoints.size()) {
    const tcp::Endpoint& to = dial->endpoints[dial->next++];
    auto fd = tcp::start_connect(to, {});
    if (!fd.ok()) {
      absl::StrAppend(&dial->errors, "; ", to.text(), ": ", fd.status().message());
      continue;
    }
    HelloInfo self = shared_->context.self;
    self.session = dial->session;
    auto greeting = std::make_unique<tcp::Greeting>(
        *fd, *shared_->poller, Handshake::Role::kClient, shared_->context.key, std::move(self),
        dial->purpose, shared_->context.clock.now() + handshake_time_, nullptr);
    calls_.push_back({std::move(greeting), std::move(dial)});
    return;
  }
  failed_.push_back(std::move(dial));
}

// The endpoint tried last will not do.
void UcxProvider::failed(std::unique_ptr<Dial> dial, const absl::Status& why) {
  const std::string at =
      dial->next == 0 ? "" : absl::StrCat(dial->endpoints[dial->next - 1].text(), ": ");
  absl::StrAppend(&dial->errors, "; ", at, why.message());
  if (absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why)) dial->refusal = why.code();
  start(std::move(dial));
}

void UcxProvider::give_up(std::unique_ptr<Dial> dial, EventSink& sink) {
  const bool unanswered = dial->next > 0 && dial->refusal == absl::StatusCode::kUnavailable;
  absl::Status why(
      dial->refusal,
      absl::StrCat("connecting to ", dial->address, " over ucx failed", dial->errors,
                   unanswered
                       ? "; is a worker listening there, and does every firewall let it through?"
                       : ""));
  if (dial->purpose == Handshake::Purpose::kQuery) {
    sink.resolved(dial->session, std::move(why));
  } else {
    sink.connect_failed(dial->session, std::move(why));
  }
}

void UcxProvider::accept_some() {
  listener_watch_.ready = 0;
  for (int i = 0; i < 16; ++i) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    // When strangers fill the house, the one that has been idle longest makes room.
    const auto stranger = [](const Call& call) { return call.dial == nullptr; };
    if (std::count_if(calls_.begin(), calls_.end(), stranger) >=
        static_cast<ptrdiff_t>(kMaxHalfOpen)) {
      calls_.erase(std::find_if(calls_.begin(), calls_.end(), stranger));
    }
    auto greeting = std::make_unique<tcp::Greeting>(
        fd, *shared_->poller, Handshake::Role::kServer, shared_->context.key, shared_->context.self,
        Handshake::Purpose::kRail, shared_->context.clock.now() + handshake_time_,
        &worker_address_);
    calls_.push_back({std::move(greeting), nullptr});
  }
}

bool UcxProvider::advance_calls(EventSink& sink) {
  bool any = false;
  const Time now = shared_->context.clock.now();
  for (size_t i = 0; i < calls_.size();) {
    using State = tcp::Greeting::State;
    tcp::Greeting& greeting = *calls_[i].greeting;
    State state = greeting.ready != 0 ? greeting.advance() : State::kUnderway;
    absl::Status why = greeting.error();
    if (state == State::kUnderway && now >= greeting.deadline()) {
      state = State::kFailed;
      why = absl::UnavailableError("no answer in time (ucx.handshake_ms)");
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
    } else if (call.dial != nullptr) {
      failed(std::move(call.dial), why);
    }
  }
  return any;
}

// The peer has proved itself: introduce the two rails to each other.
void UcxProvider::call_done(Call call, EventSink& sink) {
  tcp::Greeting& greeting = *call.greeting;
  Dial* dial = call.dial.get();
  if (greeting.purpose() == Handshake::Purpose::kQuery) {
    if (dial != nullptr) sink.resolved(dial->session, greeting.answer());
    return;
  }
  HelloInfo peer = greeting.peer();
  if (dial != nullptr) {
    if (dial->expected.uid != WorkerUid{} && peer.uid != dial->expected.uid) {
      return failed(
          std::move(call.dial),
          absl::FailedPreconditionError(absl::StrCat(
              "another worker answers there (", peer.uid.hex(), " instead of ",
              dial->expected.uid.hex(), "): if it was restarted, ask for its address again")));
    }
    peer.session = dial->session;
  }
  absl::Status status = start_engine();
  auto channel = SideChannel::create(greeting.take_fd(), *shared_->poller);
  status.Update(channel.status());
  if (!status.ok()) {
    if (dial != nullptr) failed(std::move(call.dial), status);
    return;
  }
  Joining joining;
  joining.rail = std::make_unique<UcxRail>(shared_, *std::move(channel), std::move(peer));
  joining.dial = std::move(call.dial);
  joining.deadline = shared_->context.clock.now() + handshake_time_;
  if (dial != nullptr) joining.rail->channel().say(joining.rail->introduction());
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
      failed(std::move(joining.dial), joined.status());
    }
  }
  return any;
}

// True once the rail can be used.
absl::StatusOr<bool> UcxProvider::advance(Joining& joining) {
  SideChannel& channel = joining.rail->channel();
  const auto heard = channel.hear();
  if (!heard.ok()) return heard.status();
  if (!heard->has_value()) {
    if (shared_->context.clock.now() < joining.deadline) return false;
    return absl::UnavailableError("no introduction in time (ucx.handshake_ms)");
  }
  const std::string& words = **heard;
  if (joining.introduced) {
    if (words.empty()) return true;
    return absl::UnavailableError("it introduced itself twice");
  }
  if (absl::Status status = joining.rail->introduced(words); !status.ok()) return status;
  joining.introduced = true;
  const bool client = joining.dial != nullptr;
  channel.say(client ? std::string() : joining.rail->introduction());
  return client;
}

void UcxProvider::announce(Joining joining, EventSink& sink) {
  UcxRail& rail = *joining.rail;
  rail.announced = true;
  if (joining.dial != nullptr) {
    sink.connected(joining.dial->session, rail.peer(), std::move(joining.rail));
  } else {
    sink.accepted(rail.peer(), std::move(joining.rail));
  }
}

}  // namespace baton::ucx

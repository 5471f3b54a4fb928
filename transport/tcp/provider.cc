// Listening, dialling and running the rails.
#include "transport/tcp/provider.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace baton::tcp {
namespace {

constexpr int kRounds = 4;  // of moving bytes in one progress()

std::vector<std::string> split(const std::string& addresses) {
  return absl::StrSplit(addresses, ',');
}

}  // namespace

// Named for the linker: see baton_provider() in cmake/BatonTargets.cmake.
extern "C" const ProviderRegistration baton_provider_tcp("tcp", [](const ProviderContext& context) {
  return std::unique_ptr<Provider>(new TcpProvider(context));
});

TcpProvider::TcpProvider(const ProviderContext& context)
    : shared_(std::make_shared<TcpShared>(context)) {
  capabilities_.name = "tcp";
  capabilities_.rank = 10;
  absl::Status status = configure();
  capabilities_.available = status.ok();
  if (!status.ok()) capabilities_.detail = std::string(status.message());
}

TcpProvider::~TcpProvider() {
  calls_.clear();
  if (listener_ >= 0) {
    shared_->poller->remove(listener_);
    ::close(listener_);
  }
}

absl::StatusOr<uint64_t> TcpProvider::number(std::string_view key, uint64_t fallback,
                                             uint64_t least, uint64_t most) const {
  const std::string text(setting(shared_->context, key, ""));
  if (text.empty()) return fallback;
  uint64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
    return absl::InvalidArgumentError(absl::StrCat("setting ", std::string(key), "=", text,
                                                   ": give a number from ", least, " to ", most));
  }
  return value;
}

absl::Status TcpProvider::configure() {
  auto poller = Poller::create();
  if (!poller.ok()) return poller.status();
  shared_->poller = *std::move(poller);

  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const auto sockets = number("tcp.sockets", std::clamp(cores, 2u, 4u), 1, 64);
  const auto slice = number("tcp.slice_kib", shared_->slice_bytes >> 10, 4, 1 << 20);
  const auto buffer =
      number("tcp.buffer_kib", shared_->socket_options.buffer_bytes >> 10, 0, 1 << 20);
  const auto stall = number("tcp.stall_ms", 10000, 10, 3600000);
  const auto handshake = number("tcp.handshake_ms", 5000, 10, 3600000);
  for (const auto* value : {&sockets, &slice, &buffer, &stall, &handshake}) {
    if (!value->ok()) return value->status();
  }
  sockets_ = static_cast<uint16_t>(*sockets);
  shared_->slice_bytes = *slice << 10;
  shared_->socket_options.buffer_bytes = *buffer << 10;
  shared_->stall = std::chrono::milliseconds(*stall);
  shared_->socket_options.user_timeout_ms = static_cast<int>(*stall);
  handshake_time_ = std::chrono::milliseconds(*handshake);
  shared_->socket_options.congestion =
      std::string(setting(shared_->context, "tcp.congestion", "auto"));

  const std::string_view io = setting(shared_->context, "tcp.io", "auto");
  if (io != "auto" && io != "epoll" && io != "uring") {
    return absl::InvalidArgumentError(
        absl::StrCat("setting tcp.io=", std::string(io), ": give auto, epoll or uring"));
  }
  choose_engine(io);
  return absl::OkStatus();
}

void TcpProvider::choose_engine(std::string_view wish) {
  std::string note;
  if (wish == "uring") {
    auto engine = make_uring_engine(*shared_->poller);
    if (engine.ok()) {
      shared_->engine = *std::move(engine);
    } else {
      note = absl::StrCat(" instead of io_uring: ", engine.status().message());
    }
  }
  if (shared_->engine == nullptr) shared_->engine = make_epoll_engine(*shared_->poller);
  capabilities_.detail =
      absl::StrCat(shared_->engine->name(), note, "; ", sockets_,
                   " sockets per peer, congestion control ", shared_->socket_options.congestion);
}

absl::StatusOr<std::string> TcpProvider::listen() {
  auto fd = listen_on(shared_->context.listen_host, shared_->context.listen_port,
                      shared_->socket_options);
  if (!fd.ok()) return fd.status();
  listener_ = *fd;
  absl::Status status = shared_->poller->add(listener_, EPOLLIN, listener_watch_);
  if (!status.ok()) return status;
  own_address_ = advertised(listener_);
  return own_address_;
}

absl::Status TcpProvider::reachable(const std::string& address, std::string_view host_id) const {
  bool elsewhere = !host_id.empty() && host_id != shared_->context.host_id;
  for (const std::string& one : split(address)) {
    auto parts = split_host_port(one);
    if (!parts.ok()) return parts.status();
    const std::string& host = parts->first;
    const bool loopback = host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
    if (!loopback) elsewhere = false;
  }
  if (elsewhere) {
    return absl::FailedPreconditionError(
        absl::StrCat("the peer listens on its loopback interface only (", address,
                     "): start it with a listen_host that others can reach, for example 0.0.0.0"));
  }
  return absl::OkStatus();
}

void TcpProvider::connect(const ConnectRequest& request) {
  auto dial = std::make_unique<Dial>();
  dial->session = request.session;
  dial->expected = request.expected;
  dial->rails = sockets_;
  dial->address = request.address;
  if (!capabilities_.available) {
    dial->errors = absl::StrCat("; ", capabilities_.detail);
    failed_.push_back(std::move(dial));
    return;
  }
  for (const std::string& one : split(request.address)) {
    auto endpoints = resolve(one);
    if (!endpoints.ok()) {
      absl::StrAppend(&dial->errors, "; ", endpoints.status().message());
      continue;
    }
    dial->endpoints.insert(dial->endpoints.end(), endpoints->begin(), endpoints->end());
  }
  start(std::move(dial));
}

absl::Status TcpProvider::query(uint64_t session, const std::string& host_port) {
  if (!capabilities_.available) return absl::FailedPreconditionError(capabilities_.detail);
  auto endpoints = resolve(host_port);
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
void TcpProvider::start(std::unique_ptr<Dial> dial) {
  while (dial->next < dial->endpoints.size()) {
    const Endpoint& to = dial->endpoints[dial->next++];
    auto fd = start_connect(to, shared_->socket_options);
    if (!fd.ok()) {
      absl::StrAppend(&dial->errors, "; ", to.text(), ": ", fd.status().message());
      continue;
    }
    HelloInfo self = shared_->context.self;
    self.session = dial->session;
    self.rail = dial->rail;
    self.rails = dial->rails;
    auto greeting = std::make_unique<Greeting>(
        *fd, *shared_->poller, Handshake::Role::kClient, shared_->context.key, std::move(self),
        dial->purpose, shared_->context.clock.now() + handshake_time_, nullptr);
    calls_.push_back({std::move(greeting), std::move(dial)});
    return;
  }
  failed_.push_back(std::move(dial));
}

void TcpProvider::give_up(std::unique_ptr<Dial> dial, EventSink& sink) {
  if (dial->rail > 0) return;  // the session lives on the sockets it has
  const bool unanswered = dial->refusal == absl::StatusCode::kUnavailable;
  absl::Status why(
      dial->refusal,
      absl::StrCat("connecting to ", dial->address, " over tcp failed", dial->errors,
                   unanswered
                       ? "; is a worker listening there, and does every firewall let it through?"
                       : ""));
  if (dial->purpose == Handshake::Purpose::kQuery) {
    sink.resolved(dial->session, std::move(why));
  } else {
    sink.connect_failed(dial->session, std::move(why));
  }
}

void TcpProvider::accept_some(EventSink&) {
  listener_watch_.ready = 0;
  for (int i = 0; i < 16; ++i) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // The listener stays readable, so look away for a moment.
        shared_->poller->remove(listener_);
        accept_again_ = shared_->context.clock.now() + std::chrono::milliseconds(100);
      }
      return;
    }
    // When strangers fill the house, the one that has been idle longest makes room.
    const auto stranger = [](const Call& call) { return call.dial == nullptr; };
    if (std::count_if(calls_.begin(), calls_.end(), stranger) >=
        static_cast<ptrdiff_t>(kMaxHalfOpen)) {
      calls_.erase(std::find_if(calls_.begin(), calls_.end(), stranger));
    }
    auto greeting = std::make_unique<Greeting>(
        fd, *shared_->poller, Handshake::Role::kServer, shared_->context.key, shared_->context.self,
        Handshake::Purpose::kRail, shared_->context.clock.now() + handshake_time_,
        &worker_address_);
    calls_.push_back({std::move(greeting), nullptr});
  }
}

bool TcpProvider::advance_calls(EventSink& sink) {
  bool any = false;
  const Time now = shared_->context.clock.now();
  for (size_t i = 0; i < calls_.size();) {
    Greeting& greeting = *calls_[i].greeting;
    Greeting::State state = Greeting::State::kUnderway;
    if (greeting.ready != 0) state = greeting.advance();
    absl::Status why = greeting.error();
    if (state == Greeting::State::kUnderway && now >= greeting.deadline()) {
      state = Greeting::State::kFailed;
      why = absl::UnavailableError(absl::StrCat(
          "no answer within ", std::chrono::duration<double>(handshake_time_).count(), " s"));
    }
    if (state == Greeting::State::kUnderway) {
      ++i;
      continue;
    }
    any = true;
    Call call = std::move(calls_[i]);
    calls_.erase(calls_.begin() + static_cast<ptrdiff_t>(i));
    if (state == Greeting::State::kFailed) {
      call_failed(std::move(call), std::move(why));
    } else {
      call_done(std::move(call), sink);
    }
  }
  return any;
}

void TcpProvider::call_failed(Call call, absl::Status why) {
  if (call.dial == nullptr) return;  // a stranger: nothing is known of it, nobody waits for it
  const Endpoint& at = call.dial->endpoints[call.dial->next - 1];
  absl::StrAppend(&call.dial->errors, "; ", at.text(), ": ", why.message());
  if (absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why)) {
    call.dial->refusal = why.code();
  }
  start(std::move(call.dial));
}

void TcpProvider::call_done(Call call, EventSink& sink) {
  Greeting& greeting = *call.greeting;
  if (call.dial != nullptr) return dialled(std::move(call.dial), greeting, sink);
  if (greeting.purpose() != Handshake::Purpose::kRail) return;
  HelloInfo peer = greeting.peer();
  auto rail = TcpRail::create(shared_, greeting.take_fd(), peer, peer.rails);
  if (rail.ok()) sink.accepted(peer, *std::move(rail));
}

void TcpProvider::dialled(std::unique_ptr<Dial> dial, Greeting& greeting, EventSink& sink) {
  if (dial->purpose == Handshake::Purpose::kQuery) {
    sink.resolved(dial->session, greeting.answer());
    return;
  }
  HelloInfo peer = greeting.peer();
  if (dial->expected.uid != WorkerUid{} && peer.uid != dial->expected.uid) {
    const Endpoint& at = dial->endpoints[dial->next - 1];
    absl::StrAppend(&dial->errors, "; ", at.text(), ": another worker answers there (",
                    peer.uid.hex(), " instead of ", dial->expected.uid.hex(),
                    "): if it was restarted, ask for its address again");
    dial->refusal = absl::StatusCode::kFailedPrecondition;
    return start(std::move(dial));
  }
  peer.session = dial->session;
  peer.rail = dial->rail;
  peer.rails = dial->rails;
  auto rail = TcpRail::create(shared_, greeting.take_fd(), peer, dial->rails);
  if (!rail.ok()) {
    absl::StrAppend(&dial->errors, "; ", rail.status().message());
    return start(std::move(dial));
  }
  if (dial->rail == 0) {
    // The first socket stands: the others go to the same endpoint, at once.
    const Endpoint at = dial->endpoints[dial->next - 1];
    for (uint16_t i = 1; i < dial->rails; ++i) {
      auto next = std::make_unique<Dial>();
      next->session = dial->session;
      next->expected = peer;
      next->rail = i;
      next->rails = dial->rails;
      next->address = dial->address;
      next->endpoints = {at};
      start(std::move(next));
    }
  }
  sink.connected(peer.session, peer, *std::move(rail));
}

void TcpProvider::remove_region(const RegionEntry& region, EventSink&) {
  for (TcpRail* rail : shared_->rails) {
    if (rail != nullptr) rail->remove_region(region);
  }
}

bool TcpProvider::progress(EventSink& sink) {
  bool any = false;
  while (!failed_.empty()) {
    auto dial = std::move(failed_.back());
    failed_.pop_back();
    give_up(std::move(dial), sink);
    any = true;
  }
  if (!capabilities_.available) return any;
  // While there is nobody to talk to, system calls now and then are enough: a worker whose peers
  // come by other ways should not pay for this one in every round.
  constexpr uint32_t kLookEvery = 32;
  if (calls_.empty() && shared_->rails.empty() && !look_ && ++rounds_ < kLookEvery) return any;
  rounds_ = 0;
  look_ = false;
  any |= shared_->poller->poll();
  if (listener_watch_.ready != 0) accept_some(sink);
  if (!calls_.empty()) any |= advance_calls(sink);
  std::vector<TcpRail*>& rails = shared_->rails;
  for (int round = 0; round < kRounds; ++round) {
    bool moved = false;
    for (size_t i = 0; i < rails.size(); ++i) {
      if (rails[i] != nullptr) moved |= rails[i]->advance(sink);
    }
    moved |= shared_->engine->run();
    if (!moved) break;
    any = true;
  }
  const Time now = shared_->context.clock.now();
  for (size_t i = 0; i < rails.size(); ++i) {
    if (rails[i] != nullptr) rails[i]->check_timers(now, sink);
  }
  rails.erase(std::remove(rails.begin(), rails.end(), nullptr), rails.end());
  if (now >= accept_again_) {
    accept_again_ = kNever;
    shared_->poller->add(listener_, EPOLLIN, listener_watch_).IgnoreError();
  }
  return any;
}

int TcpProvider::wait_fd() const { return shared_->poller ? shared_->poller->fd() : -1; }

bool TcpProvider::arm() {
  if (!failed_.empty()) return false;
  if (!capabilities_.available) return true;
  look_ = true;
  const auto& rails = shared_->rails;
  return !shared_->engine->runnable() &&
         std::none_of(rails.begin(), rails.end(),
                      [](const TcpRail* rail) { return rail != nullptr && rail->runnable(); });
}

Time TcpProvider::next_timer() const {
  Time next = accept_again_;
  for (const Call& call : calls_) next = std::min(next, call.greeting->deadline());
  for (const TcpRail* rail : shared_->rails) {
    if (rail != nullptr) next = std::min(next, rail->next_timer());
  }
  return next;
}

}  // namespace baton::tcp

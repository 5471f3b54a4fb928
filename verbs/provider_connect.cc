// Meeting peers: listening, dialling, and the handshake, after which a session begins.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "verbs/provider.h"

namespace baton::verbs {

absl::StatusOr<std::string> VerbsProvider::listen() {
  const ProviderContext& context = shared_.context;
  // context.listen_port is the tcp provider's, which answers host:port; the address names this one.
  auto fd = tcp::listen_on(context.listen_host, 0, socket_options_);
  if (!fd.ok()) return fd.status();
  listener_ = *fd;
  absl::Status status = shared_.poller->add(listener_, EPOLLIN, listener_watch_);
  if (!status.ok()) return status;
  return tcp::advertised(listener_);
}

absl::Status VerbsProvider::reachable(const std::string& address, std::string_view host_id) const {
  bool elsewhere = !host_id.empty() && host_id != shared_.context.host_id;
  for (const auto& one : absl::StrSplit(address, ',')) {
    auto parts = tcp::split_host_port(std::string(one));
    if (!parts.ok()) return parts.status();
    if (parts->first != "::1" && parts->first.rfind("127.", 0) != 0) elsewhere = false;
  }
  if (!elsewhere) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the peer listens on its loopback interface only (", address,
                   "): start it with a listen_host that others can reach, for example 0.0.0.0"));
}

std::string VerbsProvider::offers() const {
  std::vector<PortOffer> offers;
  for (const auto& port : shared_.hardware.ports) {
    PortOffer offer;
    offer.families = families_of(port->gids);
    auto gid = choose_gid(port->gids, shared_.tuning.gid_index, 0xff);
    if (gid.ok()) {
      offer.gid = gid->gid;
      if (shared_.tuning.gid_index >= 0) offer.families = static_cast<uint8_t>(gid->family);
    }
    offers.push_back(offer);
  }
  return encode_offers(offers);
}

void VerbsProvider::connect(const ConnectRequest& request) {
  auto dial = std::make_unique<Dial>();
  dial->session = request.session;
  dial->expected = request.expected;
  dial->address = request.address;
  for (const auto& one : absl::StrSplit(request.address, ',')) {
    auto endpoints = tcp::resolve(std::string(one));
    if (!endpoints.ok()) {
      absl::StrAppend(&dial->errors, "; ", endpoints.status().message());
      continue;
    }
    dial->endpoints.insert(dial->endpoints.end(), endpoints->begin(), endpoints->end());
  }
  start(std::move(dial));
}

absl::Status VerbsProvider::query(uint64_t session, const std::string& host_port) {
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
void VerbsProvider::start(std::unique_ptr<Dial> dial) {
  look_ = true;
  while (capabilities_.available && dial->next < dial->endpoints.size()) {
    const tcp::Endpoint& to = dial->endpoints[dial->next++];
    auto fd = tcp::start_connect(to, socket_options_);
    if (!fd.ok()) {
      absl::StrAppend(&dial->errors, "; ", to.text(), ": ", fd.status().message());
      continue;
    }
    HelloInfo self = shared_.context.self;
    self.session = dial->session;
    self.extra = offers();
    auto greeting = std::make_unique<tcp::Greeting>(
        *fd, *shared_.poller, Handshake::Role::kClient, shared_.context.key, std::move(self),
        dial->purpose, shared_.context.clock.now() + shared_.tuning.connect, nullptr);
    calls_.push_back({std::move(greeting), std::move(dial)});
    return;
  }
  failed_.push_back(std::move(dial));
}

void VerbsProvider::give_up(std::unique_ptr<Dial> dial, EventSink& sink) {
  if (!capabilities_.available) absl::StrAppend(&dial->errors, "; ", capabilities_.detail);
  const absl::Status why(dial->refusal, absl::StrCat("cannot reach ", dial->address, dial->errors));
  if (dial->purpose == Handshake::Purpose::kQuery) {
    sink.resolved(dial->session, why);
  } else {
    sink.connect_failed(dial->session, why);
  }
}

void VerbsProvider::accept_some() {
  listener_watch_.ready = 0;
  while (calls_.size() < kMaxHalfOpen) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    HelloInfo self = shared_.context.self;
    self.extra = offers();
    calls_.push_back({std::make_unique<tcp::Greeting>(
                          fd, *shared_.poller, Handshake::Role::kServer, shared_.context.key,
                          std::move(self), Handshake::Purpose::kRail,
                          shared_.context.clock.now() + shared_.tuning.connect, &worker_address_),
                      nullptr});
  }
}

bool VerbsProvider::advance_calls(EventSink& sink) {
  bool any = false;
  const Time now = shared_.context.clock.now();
  for (size_t i = 0; i < calls_.size();) {
    tcp::Greeting& greeting = *calls_[i].greeting;
    tcp::Greeting::State state = greeting.advance();
    absl::Status why = greeting.error();
    if (state == tcp::Greeting::State::kUnderway) {
      if (now < greeting.deadline()) {
        ++i;
        continue;
      }
      state = tcp::Greeting::State::kFailed;
      why = absl::UnavailableError("no answer in time");
    }
    any = true;
    Call call = std::move(calls_[i]);
    calls_.erase(calls_.begin() + static_cast<ptrdiff_t>(i));
    if (state == tcp::Greeting::State::kDone) {
      call_done(std::move(call), sink);
    } else if (call.dial != nullptr) {  // otherwise a stranger, for whom nobody waits
      Dial& dial = *call.dial;
      absl::StrAppend(&dial.errors, "; ", dial.endpoints[dial.next - 1].text(), ": ",
                      why.message());
      if (absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why)) {
        dial.refusal = why.code();
      }
      start(std::move(call.dial));
    }
  }
  return any;
}

void VerbsProvider::call_done(Call call, EventSink& sink) {
  tcp::Greeting& greeting = *call.greeting;
  Dial* const dial = call.dial.get();
  if (greeting.purpose() == Handshake::Purpose::kQuery) {
    if (dial != nullptr) sink.resolved(dial->session, greeting.answer());
    return;
  }
  HelloInfo peer = greeting.peer();
  absl::Status status;
  if (dial != nullptr) {
    if (dial->expected.uid != WorkerUid{} && peer.uid != dial->expected.uid) {
      status = absl::FailedPreconditionError(absl::StrCat(
          "another worker answers there (", peer.uid.hex(), " instead of ",
          dial->expected.uid.hex(), "): if it was restarted, ask for its address again"));
      dial->refusal = status.code();
    }
    peer.session = dial->session;
  }
  auto offers = decode_offers(peer.extra);
  if (status.ok()) status = offers.status();
  if (!status.ok()) {
    if (dial == nullptr) return;
    absl::StrAppend(&dial->errors, "; ", dial->endpoints[dial->next - 1].text(), ": ",
                    status.message());
    return start(std::move(call.dial));
  }
  sessions_.push_back(std::make_unique<Session>(
      shared_, std::make_unique<Control>(greeting.take_fd(), *shared_.poller), std::move(peer),
      *std::move(offers), dial != nullptr));
}

}  // namespace baton::verbs

// The ucx provider: reads its settings, runs its rails, and hands them UCX's messages.
#include "transport/ucx/provider.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "transport/address.h"
#include "transport/settings.h"

namespace baton::ucx {
namespace {

constexpr int kRankOfFabric = 50;
constexpr int kRankOfSoftware = 5;  // below tcp, which does the same faster
constexpr uint32_t kIdleRounds = 64;
constexpr Time kNap = std::chrono::microseconds(100);

constexpr std::array kSettings = {
    Setting::text("ucx.tls", "",
                  "UCX's transports, as in UCX_TLS; default: UCX_TLS, else all but shared memory"),
    Setting::text("ucx.net_devices", "",
                  "UCX's devices, as in UCX_NET_DEVICES; default: UCX_NET_DEVICES, else lo "
                  "for a worker on loopback and all for others"),
    Setting::number("ucx.slice_kib", "KiB", "1024", 4, 1 << 20,
                    "size of a slice, the share of a transfer that is one message"),
    Setting::number("ucx.stall_ms", "ms", "10000", 10, 3'600'000,
                    "a peer that owes an answer for this long is lost", true),
    Setting::number("ucx.handshake_ms", "ms", "5000", 10, 3'600'000,
                    "time limit for connecting to a peer and its handshake", true),
    Setting::choice("ucx.integrity", "off", "off on", "as tcp.integrity"),
    Setting::choice("ucx.encrypt", "off", "off on", "as tcp.encrypt"),
};

// Whether this machine has a device of a fabric that UCX may know how to use.
bool has_fabric() {
  std::error_code error;
  return !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
}

}  // namespace

// Named for the linker: see baton_provider() in cmake/BatonTargets.cmake.
extern "C" const ProviderRegistration baton_provider_ucx(
    "ucx",
    [](const ProviderContext& context) {
      return std::unique_ptr<Provider>(new UcxProvider(context));
    },
    kSettings,
    "tcp does the same, and UCX can abort the process when connections are lost "
    "(transport/ucx/README.md)");

UcxProvider::UcxProvider(const ProviderContext& context)
    : AcceptorProvider(context, "ucx", kRankOfSoftware,
                       [this](const net::Link& link, HelloInfo peer, std::unique_ptr<Dial> dial,
                              EventSink&) { met(link, std::move(peer), std::move(dial)); }) {
  set_available(configure());
}

UcxProvider::~UcxProvider() {
  joining_.clear();
  if (shared_->engine != nullptr) shared_->poller->remove(shared_->engine->fd());
}

absl::Status UcxProvider::configure() {
  if (absl::Status status = Library::usable(); !status.ok()) return status;
  const auto library = Library::get();
  if (!library.ok()) return library.status();
  if (absl::Status status = make_poller(); !status.ok()) return status;

  const ProviderContext& context = shared_->context;
  SettingsReader read(context, kSettings);
  read.kib("ucx.slice_kib", shared_->slice_bytes);
  read.ms("ucx.stall_ms", shared_->stall);
  read.ms("ucx.handshake_ms", patience_);
  read.text("ucx.tls", options_.tls);
  read.text("ucx.net_devices", options_.net_devices);
  const net::Protections needs = protections(read, "ucx.integrity", "ucx.encrypt");
  if (absl::Status status = read.finish(); !status.ok()) return status;
  acceptor_.open(*shared_->poller, {.patience = patience_,
                                    .patience_setting = "ucx.handshake_ms",
                                    .offers = net::kAllProtections,
                                    .needs = needs,
                                    .large_packets = net::Acceptor::LargePackets::kMustPass});
  // UCX takes messages from any process that reaches its ports: a worker that serves this machine
  // only must have none elsewhere.
  if (options_.net_devices.empty() && std::getenv("UCX_NET_DEVICES") == nullptr &&
      net::loopback_host(context.listen_host)) {
    options_.net_devices = "lo";
  }
  const char* from_environment = std::getenv("UCX_TLS");
  const bool chosen = !options_.tls.empty() || from_environment != nullptr;
  if (chosen) {
    shared_->transports = options_.tls.empty() ? from_environment : options_.tls;
  } else {
    // Not its shared memory: a peer that is killed while it puts a message into our queue there
    // blocks the queue for everything behind it, for good.
    options_.tls = "^sysv,posix,xpmem";
    shared_->transports = "all but shared memory";
  }
  const std::string version = absl::StrCat("UCX ", (*library)->version(), ", ");
  if (chosen) {
    if (absl::Status status = Engine::check(options_); !status.ok()) return status;
  }
  if (chosen || has_fabric()) {
    capabilities_.rank = kRankOfFabric;
    capabilities_.detail = absl::StrCat(version, "transports: ", shared_->transports);
  } else {
    capabilities_.detail = absl::StrCat(
        version,
        "no fabric here, so tcp is preferred; name transports by ucx.tls=LIST to prefer ucx");
  }
  return absl::OkStatus();
}

// UCX is started when the first peer is met: it costs memory, a thread and a part of every round of
// progress.
absl::Status UcxProvider::start_engine() {
  if (shared_->engine != nullptr) return absl::OkStatus();
  auto engine = Engine::create(options_, [this](std::string_view message) { received(message); });
  if (!engine.ok()) return engine.status();
  shared_->engine = *std::move(engine);
  return shared_->poller->add(shared_->engine->fd(), EPOLLIN, engine_watch_);
}

absl::Status UcxProvider::reachable(const std::string& address, std::string_view host_id) const {
  absl::Status status = AcceptorProvider::reachable(address, host_id);
  if (!status.ok()) return status;
  if (!host_id.empty() && !same_network(host_id, shared_->context.host_id) &&
      options_.net_devices == "lo") {
    return absl::FailedPreconditionError(
        "this worker listens on its loopback interface only, and UCX connects both ways: start it "
        "with a listen_host that others can reach, \"*\" for every interface");
  }
  return absl::OkStatus();
}

bool UcxProvider::progress(EventSink& sink) {
  if (!capabilities_.available) return acceptor_.progress(sink);
  const bool alone = !acceptor_.busy() && shared_->live == 0;
  // Without peers there is only the listener to look at, now and then and after sleeping.
  if (alone && ++idle_rounds_ < kIdleRounds) return false;
  idle_rounds_ = 0;

  sink_ = &sink;
  bool any = shared_->poller->poll();
  for (void* owner : shared_->poller->noticed()) static_cast<UcxRail*>(owner)->activate();
  const std::vector<UcxRail*>& rails = shared_->active;
  // A peer that has hung up before the round lands nothing in it.
  for (size_t i = 0; i < rails.size(); ++i) {
    if (rails[i] != nullptr) any |= rails[i]->check_channel(sink);
  }
  any |= acceptor_.progress(sink);
  if (!joining_.empty()) any |= advance_joining(sink);
  if (shared_->engine != nullptr) any |= advance_rails(sink);
  sink_ = nullptr;
  return any;
}

bool UcxProvider::advance_rails(EventSink& sink) {
  bool any = shared_->engine->progress();
  if (shared_->engine->take_failures()) {  // any of them may be over what has failed
    for (UcxRail* rail : shared_->rails) {
      if (rail != nullptr) rail->activate();
    }
  }
  std::vector<UcxRail*>& rails = shared_->active;
  const Time now = shared_->context.clock.now();
  for (size_t i = 0; i < rails.size(); ++i) {
    if (rails[i] != nullptr) any |= rails[i]->advance(sink);
    if (rails[i] != nullptr) rails[i]->check_timers(now, sink);
    if (rails[i] == nullptr || !rails[i]->idle()) continue;
    rails[i]->deactivate();
    rails[i] = nullptr;
  }
  rails.erase(std::remove(rails.begin(), rails.end(), nullptr), rails.end());
  return any;
}

// A message that came through UCX from any sender. Only messages sealed with the keys of a rail are
// used.
void UcxProvider::received(std::string_view message) {
  if (message.size() < Envelope::kBytes || sink_ == nullptr) return;
  const Envelope envelope = Envelope::decode(message);
  if (envelope.rail >= shared_->rails.size()) return;
  UcxRail* rail = shared_->rails[envelope.rail];
  if (rail == nullptr) return;
  std::string_view head;
  std::string_view payload;
  message.remove_prefix(Envelope::kBytes);
  if (!rail->open(envelope.number, message, head, payload)) return;
  if (!rail->announced) {  // it is sooner here than the word that the peer is ready
    const auto it = std::find_if(joining_.begin(), joining_.end(),
                                 [&](const Joining& j) { return j.rail.get() == rail; });
    if (it == joining_.end() || !it->introduced) return;
    Joining joining = std::move(*it);
    joining_.erase(it);
    announce(std::move(joining), *sink_);
  }
  rail->activate();
  rail->receive(head, payload, *sink_);
}

bool UcxProvider::arm() {
  idle_rounds_ = kIdleRounds;
  if (!acceptor_.arm()) return false;
  const auto& rails = shared_->active;
  if (std::any_of(rails.begin(), rails.end(),
                  [](const UcxRail* rail) { return rail != nullptr && rail->runnable(); })) {
    return false;
  }
  return shared_->engine == nullptr || shared_->engine->arm();
}

Time UcxProvider::next_timer() const {
  Time next = acceptor_.next_timer();
  if (shared_->engine != nullptr && shared_->engine->holds_packets()) {
    next = std::min(next, shared_->context.clock.now() + kNap);
  }
  for (const Joining& joining : joining_) next = std::min(next, joining.deadline);
  for (const UcxRail* rail : shared_->active) {
    if (rail != nullptr) next = std::min(next, rail->next_timer());
  }
  return next;
}

}  // namespace baton::ucx

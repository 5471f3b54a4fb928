// The verbs provider: opens devices, registers regions, meets peers, runs sessions, sleeps.
#include "verbs/provider.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/internal/device_memory.h"
#include "verbs/device/device.h"

namespace baton::verbs {

// Named for the linker: see baton_provider() in cmake/BatonTargets.cmake.
extern "C" const ProviderRegistration baton_provider_verbs(
    "verbs",
    [](const ProviderContext& context) {
      return std::unique_ptr<Provider>(new VerbsProvider(context, nullptr));
    },
    verbs_settings());

ProviderFactory verbs_over(const VerbsApi& api, std::shared_ptr<const Locality> locality) {
  return [&api, locality = std::move(locality)](const ProviderContext& context) {
    return std::unique_ptr<Provider>(new VerbsProvider(context, &api, locality));
  };
}

VerbsProvider::VerbsProvider(const ProviderContext& context, const VerbsApi* api,
                             std::shared_ptr<const Locality> locality)
    : AcceptorProvider(
          context, "verbs", 200,
          [this](const net::Link& link, HelloInfo peer, std::unique_ptr<net::Acceptor::Dial> dial,
                 EventSink&) { met(link, std::move(peer), std::move(dial)); }) {
  shared_->locality = std::move(locality);
  set_available(configure(api));
}

absl::Status VerbsProvider::configure(const VerbsApi* api) {
  auto tuning = read_tuning(shared_->context);
  if (!tuning.ok()) return tuning.status();
  shared_->tuning = *std::move(tuning);
  if (api == nullptr) {
    auto loaded = load_verbs();
    if (!loaded.ok()) return loaded.status();
    api = *loaded;
  }
  if (absl::Status status = make_poller(); !status.ok()) return status;
  acceptor_.open(*shared_->poller, {.sockets = {.buffer_bytes = 0},
                                    .patience = shared_->tuning.connect,
                                    .patience_setting = "verbs.connect_ms",
                                    .extra = [this] { return offers(); }});
  auto hardware = open_devices(*api, shared_->tuning);
  if (!hardware.ok()) return hardware.status();
  shared_->hardware = *std::move(hardware);
  if (shared_->locality == nullptr) shared_->locality = Locality::of_this_machine();
  for (const auto& device : shared_->hardware.devices) {
    device->set_node(shared_->locality->device_node(device->name()));
  }
  std::vector<std::string> texts;
  for (const auto& port : shared_->hardware.ports) {
    std::string text =
        absl::StrFormat("%s %.0f Gb/s", port->name(), port->bytes_per_second() * 8e-9);
    auto gid = choose_gid(port->gids, shared_->tuning.gid_index, 0xff);
    if (gid.ok()) absl::StrAppend(&text, " ", gid->reason);
    if (const int node = port->device->node(); node >= 0) {
      absl::StrAppendFormat(&text, ", NUMA node %d", node);
    }
    texts.push_back(std::move(text));
  }
  for (const auto& device : shared_->hardware.devices) {
    const absl::Status dma_buf = device->dma_buf();
    texts.push_back(dma_buf.ok() ? absl::StrCat(device->name(), " registers dma-bufs")
                                 : std::string(dma_buf.message()));
  }
  capabilities_.detail = absl::StrJoin(texts, "; ");
  if (!shared_->hardware.notes.empty()) {
    absl::StrAppend(&capabilities_.detail, "; left out: ", shared_->hardware.notes);
  }
  return watch_devices();
}

absl::Status VerbsProvider::watch_devices() {
  watches_.resize(shared_->hardware.devices.size());
  for (size_t i = 0; i < watches_.size(); ++i) {
    const Device& device = *shared_->hardware.devices[i];
    absl::Status status =
        shared_->poller->add(device.context()->async_fd, EPOLLIN, watches_[i].events);
    if (status.ok()) {
      status = shared_->poller->add(device.channel()->fd, EPOLLIN, watches_[i].completions);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string VerbsProvider::offers() const {
  std::vector<PortOffer> offers;
  for (const auto& port : shared_->hardware.ports) {
    PortOffer offer;
    offer.families = families_of(port->gids);
    offer.gids = best_gids(port->gids, most_gids(shared_->hardware.ports.size()));
    if (shared_->tuning.gid_index >= 0) {
      if (auto gid = choose_gid(port->gids, shared_->tuning.gid_index, 0xff); gid.ok()) {
        offer = {.families = static_cast<uint8_t>(gid->family), .gids = {gid->gid}};
      }
    }
    offers.push_back(std::move(offer));
  }
  return encode_offers(offers);
}

void VerbsProvider::met(const net::Link& link, HelloInfo peer,
                        std::unique_ptr<net::Acceptor::Dial> dial) {
  // The rails are quicker to find out that the network fails; while one is up, the connection may
  // take its time.
  auto control = std::make_unique<net::MessageStream>(
      link, *shared_->poller,
      net::MessageStream::Options{.max_message = kMessageBytes,
                                  .silence = std::chrono::seconds(100)});
  auto offers = decode_offers(peer.extra);
  if (!offers.ok()) {
    if (dial != nullptr) acceptor_.try_next(std::move(dial), offers.status());
    return;
  }
  sessions_.push_back(std::make_unique<Session>(*shared_, std::move(control), std::move(peer),
                                                *std::move(offers), dial != nullptr));
}

absl::Status VerbsProvider::takes(const RegionEntry& region) const {
  return reaches_memory(region);
}

absl::Status VerbsProvider::add_region(const RegionEntry& region) {
  for (const auto& device : shared_->hardware.devices) {
    absl::Status status = device->dead() ? absl::OkStatus()
                          : region.place.kind == MemoryKind::kHost
                              ? device->add_region(region)
                              : add_device_memory(*device, region);
    if (status.ok()) continue;
    for (const auto& done : shared_->hardware.devices) done->remove_region(region.index);
    return status;
  }
  note_distances(region);
  return absl::OkStatus();
}

// In the first way that works and that the adapter is seen to move bytes by.
absl::Status VerbsProvider::add_device_memory(Device& device, const RegionEntry& region) {
  std::vector<std::string> reasons;
  absl::StatusCode first = absl::StatusCode::kFailedPrecondition;
  for (const Device::Way way : {Device::Way::kDmaBuf, Device::Way::kAddress}) {
    if (way == Device::Way::kDmaBuf ? !region.file.dma_buf : !region.by_address) continue;
    absl::Status status = device.add_region(region, way);
    const auto up =
        std::find_if(shared_->hardware.ports.begin(), shared_->hardware.ports.end(),
                     [&](const auto& port) { return port->device == &device && port->up(); });
    if (status.ok() && up != shared_->hardware.ports.end()) {
      status = prove_region(**up, shared_->tuning, region, way);
    }
    if (status.ok()) return status;
    device.remove_region(region.index);
    if (reasons.empty()) first = status.code();
    reasons.emplace_back(status.message());
  }
  return absl::Status(first, absl::StrJoin(reasons, "; "));
}

// Nearer ports get more of what lies on a device, as they do of what lies on a NUMA node.
void VerbsProvider::note_device_distances(const RegionEntry& region) {
  const internal::DeviceMemory* const devices = internal::device_memory();
  if (devices == nullptr || region.place.device < 0) return;
  const std::string address = devices->pci_address(region.place.device);
  std::array<float, kMaxPorts> costs{};
  float least = std::numeric_limits<float>::max();
  for (const auto& port : shared_->hardware.ports) {
    const base::PciDistance distance =
        shared_->locality->pci_distance(port->device->name(), address);
    shared_->device_distances[{port->index, region.place.device}] = distance;
    costs[port->index] = static_cast<float>(base::cost(distance));
    least = std::min(least, costs[port->index]);
  }
  std::vector<float>& all = shared_->distances;
  const size_t first = size_t{region.index} * kMaxPorts;
  if (all.size() < first + kMaxPorts) all.resize(first + kMaxPorts, 1);
  for (const auto& port : shared_->hardware.ports) {
    all[first + port->index] = costs[port->index] / least;
  }
}

// Its pages are in their places: registering has pinned them.
void VerbsProvider::note_distances(const RegionEntry& region) {
  if (region.place.kind != MemoryKind::kHost) return note_device_distances(region);
  std::vector<float>& all = shared_->distances;
  const int node = shared_->locality->memory_node(region.base, region.size);
  if (node < 0 && all.empty()) return;
  const size_t first = size_t{region.index} * kMaxPorts;
  if (all.size() < first + kMaxPorts) all.resize(first + kMaxPorts, 1);
  for (const auto& port : shared_->hardware.ports) {
    all[first + port->index] =
        static_cast<float>(shared_->locality->distance(port->device->node(), node));
  }
}

absl::Status VerbsProvider::remove_region(const RegionEntry& region, EventSink&) {
  // Peers are told first, so that few of their writes come to what is deregistered.
  for (const auto& session : sessions_) {
    session->region_removed({region.index, region.generation, region.key});
  }
  for (const auto& device : shared_->hardware.devices) device->remove_region(region.index);
  return absl::OkStatus();
}

bool VerbsProvider::device_events() {
  bool any = false;
  for (size_t i = 0; i < watches_.size(); ++i) {
    Device& device = *shared_->hardware.devices[i];
    if (std::exchange(watches_[i].completions.ready, 0) != 0) {
      while (device.next_completion_event()) any = true;
    }
    if (std::exchange(watches_[i].events.ready, 0) == 0) continue;
    Device::Event event;
    while (device.next_event(event)) {
      on_event(device, event);
      any = true;
    }
  }
  return any;
}

void VerbsProvider::on_event(Device& device, const Device::Event& event) {
  const auto changed = [&](Port& port) {
    for (const auto& session : sessions_) session->port_changed(port);
  };
  switch (event.type) {
    case IBV_EVENT_SRQ_ERR:
      device.give_up_receive_pool();
      [[fallthrough]];
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
    case IBV_EVENT_CQ_ERR:
      for (const auto& session : sessions_) session->device_event(device, event);
      return;
    default:
      break;
  }
  if (event.type == IBV_EVENT_DEVICE_FATAL) device.set_dead();
  for (const auto& port : shared_->hardware.ports) {
    if (port->device != &device) continue;
    if (event.type == IBV_EVENT_DEVICE_FATAL) {
      port->attributes.state = IBV_PORT_DOWN;
      changed(*port);
    } else if (event.port == port->number) {
      // Reads the addresses again: after a flap the same addresses may have another index.
      (void)device.refresh(*port);
      changed(*port);
    }
  }
}

bool VerbsProvider::progress(EventSink& sink) {
  constexpr uint32_t kLookEvery = 32;
  if (!capabilities_.available) return acceptor_.progress(sink);
  bool any = false;
  // System calls, and the clock may be one too: not in every round while the rails are busy.
  const bool look = look_ || acceptor_.busy() || ++rounds_ >= kLookEvery;
  if (look) {
    rounds_ = 0;
    now_ = shared_->context.clock.now();
    any |= shared_->poller->poll();
    any |= acceptor_.progress(sink);
    any |= device_events();
  }
  look_ = false;
  shared_->may_make_queue_pair = true;
  for (size_t i = 0; i < sessions_.size(); ++i) {
    any |= sessions_[i]->progress(now_, look, sink);
    look_ |= sessions_[i]->busy();
    if (sessions_[i]->finished()) {
      sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(i--));
    }
  }
  return any;
}

bool VerbsProvider::arm() {
  if (!acceptor_.arm()) return false;
  look_ = true;
  bool armed = true;
  for (const auto& session : sessions_) armed &= session->arm();
  return armed;
}

Time VerbsProvider::next_timer() const {
  Time next = acceptor_.next_timer();
  for (const auto& session : sessions_) next = std::min(next, session->next_timer());
  return next;
}

}  // namespace baton::verbs

// A session: everything between this worker and one connection's peer. It pairs the ports of both,
// makes a queue pair for each rail and brings lost rails back, answers questions about regions, and
// lets the two ends of a broken rail agree on what came over it.
//
// The side that connected makes the rails; the other answers. Messages of a session go over the
// control connection and, where one is up, over a rail as well, so that neither a dead link under
// TCP nor a dead rail holds them up. They may therefore come twice, and in any order: each names a
// rail and its incarnation, and is ignored when it says nothing new.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/net/message_stream.h"
#include "transport/provider.h"
#include "verbs/device/locality.h"
#include "verbs/device/regions.h"
#include "verbs/rail.h"

namespace baton::verbs {

// The state that the sessions of one provider share.
struct Shared {
  explicit Shared(const ProviderContext& provider_context) : context(provider_context) {}

  const ProviderContext& context;
  Tuning tuning;
  Devices hardware;
  std::unique_ptr<net::Poller> poller;
  std::shared_ptr<const Locality> locality;
  // Making one takes the kernel long (some 100 us), so a round of progress makes one at most.
  bool may_make_queue_pair = true;
  // By region and port, as Locality::distance(); empty while all are 1.
  std::vector<float> distances;
  // A port's distance from the CUDA devices whose memory is registered, for people.
  std::map<std::pair<uint8_t, int>, base::PciDistance> device_distances;
};

class Session {
 public:
  // `offers` are the peer's ports.
  Session(Shared& shared, std::unique_ptr<net::MessageStream> control, HelloInfo peer,
          std::vector<PortOffer> offers, bool connecting);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // `look`: at everything; otherwise, while all is well, only at the rails. `now` may be as old as
  // the last look.
  bool progress(Time now, bool look, EventSink& sink);
  Time next_timer() const;
  bool arm();
  // Over, and no rail of it is left anywhere.
  bool finished() const { return over_ && rails_.empty(); }
  // Something is under way that progress() should look at often.
  bool busy() const { return busy_ || disturbed_; }

  // Called by the provider.
  void region_removed(const RegionName& name);
  void port_changed(const Port& port);
  void device_event(const Device& device, const Device::Event& event);

  // --- for its rails ---
  const Tuning& tuning() const { return tuning_; }
  CounterTable& counters() { return shared_.context.counters; }
  Time now() const { return shared_.context.clock.now(); }
  bool others_up(const VerbsRail& rail) const;
  // How far a local region is from a port, as Locality::distance().
  double distance(const Port& port, uint32_t region) const {
    const size_t at = size_t{region} * kMaxPorts + port.index;
    return at < shared_.distances.size() ? shared_.distances[at] : 1;
  }
  // The device memory that a port reaches, by which way and over which distance; "" if none.
  std::string about_devices(const Port& port) const;
  // Whether a local region is memory that the processor can read as any other.
  bool host_memory(uint32_t region) const {
    return shared_.context.regions.entries()[region].place.kind == MemoryKind::kHost;
  }
  bool stays(uint32_t region) const { return shared_.context.regions.stays(region); }
  const KnownRegion* region(const RegionName& name, VerbsRail& rail);
  const KnownRegion* known(const RegionName& name) const { return regions_.known(name); }
  void forget(const RegionName& name) { regions_.forget(name); }
  absl::Status on_message(const Message& message, VerbsRail* rail, EventSink& sink);
  void rail_ready(VerbsRail& rail, EventSink& sink);
  void rail_broke() {
    disturbed_ = true;
    regions_.forget_asked();
  }
  void rail_drained(const VerbsRail& rail, bool lost);
  void rail_settled(const VerbsRail& rail);
  void rail_gone(VerbsRail& rail, const absl::Status& why, bool closed);
  void forget(VerbsRail& rail);

 private:
  enum class Phase {
    kIdle,     // no queue pair; at `due`, the connecting side makes one
    kCalling,  // kConnect is on its way
    kProving,  // joined; kReady is on its way
    kUp,
    kClosed,  // for good
  };
  struct Slot {
    uint8_t port = 0;  // index of ours
    uint8_t peer_port = 0;
    Phase phase = Phase::kIdle;
    uint32_t incarnation = 0;
    bool recovery = false;
    Time due = kNever;
    std::unique_ptr<QueuePair> pending;
    std::unique_ptr<VerbsRail> fresh;  // not up yet
    VerbsRail* rail = nullptr;         // the worker's
    std::optional<Endpoint> asked;     // kConnect that cannot be answered yet
    absl::Status why;                  // of the last failure
  };

  void pair_ports();
  void say(const std::string& message, const VerbsRail* about);
  // False: not in this round of progress.
  bool may_make_queue_pair() {
    const bool may = std::exchange(shared_.may_make_queue_pair, false);
    disturbed_ = disturbed_ || !may;
    return may;
  }
  absl::StatusOr<std::unique_ptr<QueuePair>> make_queue_pair(const Slot& slot, uint8_t families,
                                                             absl::Span<const ibv_gid> near) const;
  void call(uint16_t index);
  void answer(uint16_t index, EventSink& sink);
  absl::Status join(uint16_t index, const Endpoint& peer);
  void attempt_failed(uint16_t index, const absl::Status& why);
  void refuse(uint16_t index, const absl::Status& why);  // attempt_failed(), and tells the peer
  static VerbsRail* rail_of(const Slot& slot) {
    return slot.fresh != nullptr ? slot.fresh.get() : slot.rail;
  }
  void on_connect(const Endpoint& peer);
  void on_connected(const Endpoint& peer);
  void on_ask(const RegionName& name, VerbsRail* rail);
  absl::Status on_rail_note(Kind kind, const RailNote& note, EventSink& sink);

  void check_timers(Time now);
  bool alive(const Slot& slot) const;
  bool unfinished() const;
  bool look_at_control(EventSink& sink);
  void end(const absl::Status& why, EventSink& sink);

  Shared& shared_;
  std::unique_ptr<net::MessageStream> control_;
  HelloInfo peer_;
  const std::vector<PortOffer> offers_;
  Tuning tuning_;
  const bool connecting_;
  bool established_ = false;  // has had a rail
  bool over_ = false;
  bool disturbed_ = true;  // something has happened that progress() must look at
  bool busy_ = true;
  std::vector<Slot> slots_;
  std::vector<VerbsRail*> rails_;                      // all that exist
  std::vector<std::unique_ptr<VerbsRail>> discarded_;  // never came up
  KnownRegions regions_;
  std::string scratch_;
};

}  // namespace baton::verbs

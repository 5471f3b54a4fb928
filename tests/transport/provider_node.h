// One side of a connection for tests of a provider: the provider with its tables, and a sink that
// records what it hears.
#pragma once

#include "tests/std.h"
#include "tests/until.h"
#include "transport/provider.h"

namespace baton {

class ProviderNode : public EventSink {
 public:
  using Settings = std::vector<std::pair<std::string, std::string>>;

  ProviderNode(const std::string& which, const std::string& name, Settings settings,
               const std::string& secret, uint16_t port = 0, const Clock& clock = Clock::steady())
      : key(*ClusterKey::from_bytes(secret)),
        self{.uid = WorkerUid::random(), .name = name},
        regions(self.uid),
        counters(*CounterTable::create(self.uid)),
        context{.clock = clock,
                .key = key,
                .self = self,
                .host_id = "here",
                .regions = regions,
                .counters = counters,
                .listen_port = port,
                .settings = std::move(settings)} {
    for (const auto& [registered, factory] : registered_providers()) {
      if (registered == which) provider = factory(context);
    }
  }

  struct Done {
    TransferId transfer;
    uint32_t slice;
    absl::Status status;
  };
  struct Landed {
    Arrival arrival;
    std::string notify;
  };

  void slice_done(Rail&, TransferId transfer, uint32_t slice, absl::Status status) override {
    done.push_back({transfer, slice, std::move(status)});
  }
  void arrived(Rail&, const Arrival& arrival) override {
    landed.push_back({arrival, std::string(arrival.notify)});
    landed.back().arrival.notify = {};
    if (!arrival.notify.empty()) notes.emplace_back(arrival.notify);
    if (arrival.slice_bytes == arrival.total_bytes && arrival.counter_generation != 0) {
      counters.add(arrival.counter_index, arrival.counter_generation, arrival.increment);
    }
  }
  void connected(uint64_t, const HelloInfo& info, std::unique_ptr<Rail> rail) override {
    peer = info;
    rails.push_back(std::move(rail));
  }
  void connect_failed(uint64_t, absl::Status why) override { failed = std::move(why); }
  void accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) override {
    peer = info;
    rails.push_back(std::move(rail));
  }
  void rail_down(Rail& rail, absl::Status why) override {
    down.push_back(std::move(why));
    for (auto& mine : rails) {
      if (mine.get() == &rail) closed_rails.push_back(std::move(mine));
    }
    std::erase(rails, nullptr);
  }
  void resolved(uint64_t, absl::StatusOr<std::string> encoded, std::string_view) override {
    answer = std::make_unique<absl::StatusOr<std::string>>(std::move(encoded));
  }

  bool progress() {
    const bool any = provider->progress(*this);
    closed_rails.clear();
    return any;
  }

  // A transfer of ours; lives as long as the node.
  TransferDescriptor& transfer(Op op, void* local, Layout local_layout, const RemoteRegion& remote,
                               Layout remote_layout) {
    auto t = std::make_unique<TransferDescriptor>();
    t->id = {next_slot++, 1};
    t->op = op;
    t->local_base = static_cast<std::byte*>(local);
    t->local = local_layout;
    t->remote = remote;
    t->remote_layout = remote_layout;
    t->bytes = local_layout.bytes();
    transfers.push_back(std::move(t));
    return *transfers.back();
  }

  ClusterKey key;
  HelloInfo self;
  RegionTable regions;
  CounterTable counters;
  ProviderContext context;
  std::unique_ptr<Provider> provider;

  std::vector<std::unique_ptr<Rail>> rails;
  std::vector<std::unique_ptr<Rail>> closed_rails;
  std::vector<Done> done;
  std::vector<Landed> landed;
  std::vector<std::string> notes;
  std::vector<absl::Status> down;
  HelloInfo peer;
  absl::Status failed;
  std::unique_ptr<absl::StatusOr<std::string>> answer;
  std::vector<std::unique_ptr<TransferDescriptor>> transfers;
  uint32_t next_slot = 0;
};

// One round of the nodes. Where nothing moves they sleep on their descriptors, but never for long:
// `ready` may look at other things than nodes.
inline void turn(const std::vector<ProviderNode*>& nodes, const std::function<bool()>& ready) {
  bool any = false;
  for (ProviderNode* node : nodes) any |= node->progress();
  if (any) return;
  const Time now = Clock::steady().now();
  bool armed = true;
  Time next = now + std::chrono::milliseconds(100);
  std::vector<pollfd> fds;
  for (ProviderNode* node : nodes) {
    armed &= node->provider->arm();
    next = std::min(next, node->provider->next_timer());
    fds.push_back({node->provider->wait_fd(), POLLIN, 0});
  }
  const auto wait =
      std::chrono::ceil<std::chrono::milliseconds>(std::max(next - now, Time::zero()));
  if (armed && !ready()) ::poll(fds.data(), fds.size(), static_cast<int>(wait.count()));
}

inline void until(const std::vector<ProviderNode*>& nodes, const std::function<bool()>& fact,
                  CallSite from = CallSite::here()) {
  const auto state = [&] {
    std::ostringstream out;
    for (const ProviderNode* node : nodes) {
      out << node->self.name << ": " << node->rails.size() << " rails, " << node->down.size()
          << " lost, " << node->done.size() << " slices done, " << node->landed.size()
          << " landed, " << node->failed << "; ";
    }
    return out.str();
  };
  until(
      fact, [&] { turn(nodes, fact); }, state, from);
}

}  // namespace baton

// The in-memory pair of connectors.
#include "tests/engine_serve/loopback_connector.h"

#include "tests/test.h"

namespace baton::engine::serve {

class LoopbackDecode : public kvtransfer::KvConnector {
 public:
  explicit LoopbackDecode(LoopbackLink& link) : link_(link) {}
  absl::StatusOr<void*> allocate_cache(const kvtransfer::KvLayout& layout) override {
    return link_.allocate(link_.target_, layout);
  }
  std::string address() const override { return "decode"; }
  void progress() override { link_.move_some(); }
  void wait(Time, int) override {
    ++link_.sleeps;
    if (link_.pump_) link_.pump_();
    link_.move_some();
  }
  kvtransfer::KvConnectorStats stats() const override { return {}; }

  absl::Status start_load(kvtransfer::KvLoad request) override {
    EXPECT_EQ(request.prefill, "prefill");
    EXPECT_EQ(request.first_token % 16, 0u);
    EXPECT_LT(request.first_token, request.tokens.size());
    EXPECT_EQ(request.blocks.size(), (request.tokens.size() - request.first_token + 15) / 16);
    if (link_.chance(link_.faults_.refuse_start)) {
      ++link_.loads_failed;
      return absl::UnavailableError("injected: the prefill worker cannot be reached");
    }
    ++link_.loads_started;
    const kvtransfer::KvRequestId id = request.id;
    auto [it, inserted] = link_.loads_.try_emplace(id);
    EXPECT_TRUE(inserted) << "load id " << id << " is not new";
    LoopbackLink::Load& load = it->second;
    const uint32_t layers = link_.target_.layout.layers();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      for (uint32_t block : request.blocks) {
        std::memset(link_.target_.block(layer, block), 0xff, link_.target_.block_bytes());
      }
    }
    load.arrived.resize(layers);
    const size_t copies = request.blocks.size() * layers;
    if (link_.chance(link_.faults_.fail_load)) {
      load.fails_after = static_cast<int>(link_.random_() % copies);
    } else if (link_.chance(link_.faults_.lose_load)) {
      load.polls_left = 1 + static_cast<int>(link_.random_() % 50);
    }
    load.request = std::move(request);
    return absl::OkStatus();
  }

  uint32_t layers_loaded(kvtransfer::KvRequestId id) override {
    const LoopbackLink::Load& load = open(id);
    uint32_t layers = 0;
    while (layers < load.arrived.size() && load.arrived[layers] == load.request.blocks.size()) {
      ++layers;
    }
    return layers;
  }

  absl::Status load_status(kvtransfer::KvRequestId id) override { return open(id).status; }

  absl::Status wait_for_layer(kvtransfer::KvRequestId id, uint32_t layer) override {
    while (layers_loaded(id) <= layer) {
      if (!load_status(id).ok()) return load_status(id);
      link_.pump_();
      link_.move_some();
    }
    return absl::OkStatus();
  }

  bool end_load(kvtransfer::KvRequestId id) override {
    LoopbackLink::Load& load = link_.loads_.at(id);
    EXPECT_FALSE(load.gone) << "end_load after it returned true";
    if (!load.ended) {
      load.ended = true;
      load.quiet_after = static_cast<int>(link_.random_() % 8);
    }
    load.gone = load.quiet_after-- <= 0;
    return load.gone;
  }

  std::optional<kvtransfer::KvJob> next_job() override { return std::nullopt; }
  bool is_wanted(uint64_t) override { return false; }
  absl::Status save_layer(uint64_t, uint32_t, uint32_t, absl::Span<const uint32_t>) override {
    return absl::UnimplementedError("this is the decode side");
  }
  void finish_job(uint64_t, const absl::Status&) override {}
  bool is_saved(uint64_t) override { return true; }

 private:
  LoopbackLink::Load& open(kvtransfer::KvRequestId id) {
    LoopbackLink::Load& load = link_.loads_.at(id);
    EXPECT_FALSE(load.ended) << "load " << id << " was ended";
    return load;
  }
  LoopbackLink& link_;
};

class LoopbackPrefill : public kvtransfer::KvConnector {
 public:
  explicit LoopbackPrefill(LoopbackLink& link) : link_(link) {}
  absl::StatusOr<void*> allocate_cache(const kvtransfer::KvLayout& layout) override {
    return link_.allocate(link_.source_, layout);
  }
  std::string address() const override { return "prefill"; }
  void progress() override { link_.move_some(); }
  void wait(Time, int) override { link_.move_some(); }
  kvtransfer::KvConnectorStats stats() const override { return {}; }

  absl::Status start_load(kvtransfer::KvLoad) override {
    return absl::UnimplementedError("this is the prefill side");
  }
  uint32_t layers_loaded(kvtransfer::KvRequestId) override { return 0; }
  absl::Status load_status(kvtransfer::KvRequestId) override { return absl::OkStatus(); }
  absl::Status wait_for_layer(kvtransfer::KvRequestId, uint32_t) override {
    return absl::OkStatus();
  }
  bool end_load(kvtransfer::KvRequestId) override { return true; }

  std::optional<kvtransfer::KvJob> next_job() override {
    for (auto& [id, load] : link_.loads_) {
      if (load.taken || load.ended || load.polls_left >= 0 || link_.chance(0.3)) continue;
      load.taken = true;
      load.job = link_.next_job_++;
      return kvtransfer::KvJob{load.job, id, "decode", load.request.tokens,
                               load.request.first_token};
    }
    return std::nullopt;
  }

  bool is_wanted(uint64_t job) override {
    const LoopbackLink::Load& load = *link_.by_job(job);
    return !load.ended && load.status.ok();
  }

  absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                          absl::Span<const uint32_t> blocks) override {
    LoopbackLink::Load& load = *link_.by_job(job);
    EXPECT_FALSE(load.finished) << "save_layer after finish_job";
    const uint32_t first_wanted = load.request.first_token / 16;
    for (uint32_t i = 0; i < blocks.size(); ++i) {
      const uint32_t index = first_block + i;
      EXPECT_TRUE(load.handed_over.insert({layer, index}).second)
          << "block " << index << " of layer " << layer << " was handed over twice";
      EXPECT_GE(index, first_wanted);
      if (load.gone) continue;
      const char* content = reinterpret_cast<const char*>(link_.source_.block(layer, blocks[i]));
      load.queue.push_back({layer, blocks[i], load.request.blocks.at(index - first_wanted),
                            std::string(content, link_.source_.block_bytes())});
    }
    return absl::OkStatus();
  }

  void finish_job(uint64_t job, const absl::Status& outcome) override {
    LoopbackLink::Load& load = *link_.by_job(job);
    EXPECT_FALSE(load.finished);
    load.finished = true;
    if (!outcome.ok() && load.status.ok()) load.status = outcome;
    if (!outcome.ok()) return;
    EXPECT_EQ(load.handed_over.size(), load.request.blocks.size() * load.arrived.size());
  }

  bool is_saved(uint64_t job) override {
    const LoopbackLink::Load& load = *link_.by_job(job);
    EXPECT_TRUE(load.finished);
    return load.queue.empty();
  }

 private:
  LoopbackLink& link_;
};

LoopbackLink::LoopbackLink(uint64_t seed, LoopbackFaults faults)
    : random_(seed),
      faults_(faults),
      decode_(std::make_unique<LoopbackDecode>(*this)),
      prefill_(std::make_unique<LoopbackPrefill>(*this)) {}

LoopbackLink::~LoopbackLink() = default;

void* LoopbackLink::allocate(Side& side, const kvtransfer::KvLayout& layout) {
  EXPECT_TRUE(layout.check().ok()) << layout.check();
  side.layout = layout;
  const size_t bytes = (layout.bytes() + 4095) / 4096 * 4096;
  side.memory = {static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), std::free};
  std::memset(side.memory.get(), 0xff, bytes);
  return side.memory.get();
}

LoopbackLink::Load* LoopbackLink::by_job(uint64_t job) {
  for (auto& [id, load] : loads_) {
    if (load.taken && load.job == job) return &load;
  }
  ADD_FAILURE() << "there is no job " << job;
  return nullptr;
}

void LoopbackLink::deliver(Load& load, size_t index) {
  Copy copy = std::move(load.queue[index]);
  load.queue.erase(load.queue.begin() + static_cast<ptrdiff_t>(index));
  EXPECT_EQ(
      std::memcmp(copy.content.data(), source_.block(copy.layer, copy.source), copy.content.size()),
      0)
      << "a block changed while it was being sent";
  if (load.gone || !load.status.ok()) {
    if (!load.gone) {
      std::memset(target_.block(copy.layer, copy.target), 0xff, copy.content.size());
      ++late_writes;
    }
    return;
  }
  if (load.ended) ++late_writes;
  std::memcpy(target_.block(copy.layer, copy.target), copy.content.data(), copy.content.size());
  ++load.arrived[copy.layer];
  ++blocks_moved;
  load.arrived_copies.push_back(std::move(copy));
}

// As after a rail was lost before its acknowledgements came.
void LoopbackLink::repeat_one(const Load& load) {
  const Copy& copy = load.arrived_copies[random_() % load.arrived_copies.size()];
  std::memcpy(target_.block(copy.layer, copy.target), copy.content.data(), copy.content.size());
  ++repeats;
}

void LoopbackLink::move_some() {
  for (auto& [id, load] : loads_) {
    if (load.polls_left > 0 && --load.polls_left == 0) {
      load.status = absl::DeadlineExceededError("injected: nothing arrived");
      ++loads_failed;
    }
    for (int i = 0; i < 5 && !load.queue.empty(); ++i) {
      if (!chance(faults_.speed)) continue;
      if (load.fails_after == 0 && load.status.ok() && !load.ended) {
        load.status = absl::UnavailableError("injected: the prefill worker died");
        ++loads_failed;
      }
      if (load.fails_after > 0) --load.fails_after;
      const size_t next = random_() % load.queue.size();
      const int hold = hold_from_layer;
      if (hold >= 0 && load.queue[next].layer >= static_cast<uint32_t>(hold)) continue;
      deliver(load, next);
    }
    if (!load.gone && !load.arrived_copies.empty() && chance(faults_.repeat)) repeat_one(load);
  }
}

}  // namespace baton::engine::serve

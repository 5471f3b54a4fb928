// Two workers, a connection and memory, for each provider under test.
#include "tests/conformance/harness.h"

#include <algorithm>
#include <numeric>

namespace baton {

std::ostream& operator<<(std::ostream& out, const Variant& variant) { return out << variant.name; }

WorkerOptions Conformance::options(const char* name, size_t node) {
  WorkerOptions options;
  options.name = name;
  options.key = *ClusterKey::from_bytes(cluster_key_);
  options.settings = GetParam().settings;
  options.max_transfers = max_transfers_;
  if (sim()) {
    options.clock = &fabric_->clock();
    options.extra_providers = {fabric_->provider_factory(node)};
  } else if (surroundings_ != nullptr) {
    surroundings_->prepare(options);
  } else {
    options.providers = {GetParam().provider};
  }
  if (GetParam().decorated) {
    options.shape = LinkShape{.bytes_per_second = 4e9, .latency = std::chrono::microseconds(20)};
    options.timeline = &*timeline_;
  }
  return options;
}

void Conformance::SetUp() { start(); }

void Conformance::start(size_t block_bytes) {
  if (std::string_view(GetParam().provider) == "sim") {
    fabric_.emplace(sim::SimOptions{.nodes = 4, .rails = 2});
  }
  if (std::string_view(GetParam().provider) == "verbs_fake") {
    surroundings_ = fake_verbs_surroundings();
    if (surroundings_ == nullptr) GTEST_SKIP() << "built without the headers of rdma-core";
  }
  if (GetParam().near_device || GetParam().far_device) {
    devices_ = fake_devices(GetParam().dma_buf, GetParam().ipc);
  }
  timeline_.emplace("conformance");
  make_side(a_, "a", 0, block_bytes);
  if (HasFatalFailure() || IsSkipped()) return;
  make_side(b_, "b", 1, block_bytes);
  if (HasFatalFailure() || IsSkipped()) return;
  std::tie(a_.peer, b_.peer) = connect(a_, b_);
}

void Conformance::make_side(Side& side, const char* name, size_t node, size_t block_bytes) {
  auto worker = Worker::create(options(name, node));
  if (!worker.ok() && absl::IsUnavailable(worker.status())) GTEST_SKIP() << worker.status();
  side.worker = must(std::move(worker));
  side.pool = must(MemoryPool::create(*side.worker, {.slab_bytes = 1 << 20}));
  const bool on_device =
      (node == 0 && GetParam().near_device) || (node == 1 && GetParam().far_device);
  if (on_device) {
    const Devices::Memory memory = devices_->allocate(block_bytes);
    auto region = must(side.worker->register_memory(memory.address, block_bytes));
    side.block = {.data = memory.view, .size = block_bytes, .region = region};
    side.on_device = memory.address;
  } else {
    side.block = side.pool->allocate(block_bytes).value();
  }
  side.remote = side.worker->remote_region(side.block.region).value();
  if (sim()) fabric_->attach(*side.worker, node);
}

std::pair<PeerId, PeerId> Conformance::connect(Side& from, Side& to) {
  while (to.worker->next_peer_event()) {
  }
  auto peer = must(from.worker->connect(to.worker->address()));
  PeerId back;
  until([&] {
    while (auto event = to.worker->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) back = event->peer;
    }
    return back.generation != 0 && from.worker->peer_state(peer) == PeerState::kUp;
  });
  return {peer, back};
}

void Conformance::TearDown() {
  for (Side* side : {&a_, &b_}) {
    if (side->worker != nullptr && fabric_) fabric_->detach(*side->worker);
    side->pool.reset();
    side->worker.reset();
  }
  if (fabric_) {
    EXPECT_THAT(fabric_->violations(), testing::IsEmpty());
  }
  if (surroundings_ != nullptr) surroundings_->check();
  if (devices_ != nullptr) devices_->check();
}

std::string Conformance::state() const {
  std::string out;
  for (const Side* side : {&a_, &b_}) {
    if (side->worker != nullptr)
      out += state_of(*side->worker, side->peer, side == &a_ ? "a" : "b");
  }
  return out;
}

void Conformance::until(const std::function<bool()>& fact, CallSite from) {
  if (sim() && !fabric_->run_until(fact, kPatience)) give_up(state(), from);
  const auto turn = [&] {
    for (Side* side : {&a_, &b_}) {
      if (side->worker != nullptr) side->worker->progress();
    }
  };
  if (!sim())
    baton::until(
        fact, turn, [&] { return state(); }, from);
}

void Conformance::nudge(size_t amount) {
  if (sim()) {
    fabric_->run_for(std::chrono::microseconds(amount));
    return;
  }
  for (size_t i = 0; i < amount; ++i) {
    a_.worker->progress();
    b_.worker->progress();
  }
}

void Conformance::settle() {
  if (sim()) {
    fabric_->run_for(std::chrono::milliseconds(10));
    return;
  }
  // Enough messages that some take every connection that the provider has.
  for (Side* side : {&a_, &b_}) {
    if (side->worker->peer_state(side->peer) != PeerState::kUp) continue;
    std::vector<TransferId> ids;
    for (int i = 0; i < 32; ++i) {
      auto id = side->worker->notify(side->peer, "").value();
      ids.push_back(id);
    }
    for (TransferId id : ids) EXPECT_TRUE(finish(*side, id).ok());
  }
  nudge(100);
}

TransferRequest Conformance::request(Op op, const Side& from, const Side& to, size_t at,
                                     size_t bytes) const {
  return {.op = op,
          .peer = from.peer,
          .local = from.block.region,
          .local_layout = Layout::contiguous(from.offset(at), bytes),
          .remote = to.remote,
          .remote_layout = Layout::contiguous(to.offset(at), bytes)};
}

TransferId Conformance::submit(Side& side, const TransferRequest& request) {
  return must(side.worker->submit(request));
}

bool Conformance::ended(Side& side, TransferId id) {
  auto state = side.worker->state(id);
  return !state.ok() || baton::ended(*state);
}

absl::Status Conformance::finish(Side& side, TransferId id) {
  until([&] { return ended(side, id); });
  absl::Status status = side.worker->status(id);
  const absl::Status released = side.worker->release(id);
  return released.ok() ? status : released;
}

absl::Status Conformance::run(Side& side, const TransferRequest& request) {
  auto id = side.worker->submit(request);
  return id.ok() ? finish(side, *id) : id.status();
}

std::byte filled(uint64_t seed, size_t at) {
  return std::byte((seed * 131 + at * 7 + (at >> 8) * 3 + (at >> 16) * 5) & 127);
}

void fill(std::byte* data, size_t bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes; ++i) data[i] = filled(seed, i);
}

bool holds(const std::byte* data, size_t bytes, std::byte value) {
  return std::all_of(data, data + bytes, [&](std::byte byte) { return byte == value; });
}

namespace {

bool try_box(RandomBox& out, std::mt19937_64& random, size_t bytes, size_t base, size_t limit) {
  out = RandomBox();
  const auto pick = [&](size_t n) { return static_cast<size_t>(random() % n); };
  // Deal the prime factors out to the piece and up to four dimensions.
  const size_t dims = pick(5);
  std::vector<size_t> counts(dims, 1);
  size_t piece = bytes;
  for (size_t prime : {2, 3, 5, 7}) {
    while (piece % prime == 0 && piece > 0 && dims > 0) {
      const size_t target = pick(dims + 2);
      if (target >= dims) break;
      counts[target] *= prime;
      piece /= prime;
    }
  }
  std::vector<Dim> boxes(dims);
  out.pages.resize(dims);
  size_t extent = piece;
  for (size_t d = dims; d-- > 0;) {  // innermost last
    const size_t slack = limit / std::max<size_t>(1, extent * counts[d]);
    const size_t stride = extent + (slack > 2 && pick(2) ? pick(extent / 2 + 2) : 0);
    boxes[d] = {counts[d], stride, nullptr};
    size_t last = counts[d] - 1;
    if (pick(2) == 0) {
      std::vector<uint32_t>& pages = out.pages[d];
      pages.resize(counts[d] + (stride * counts[d] * 2 < limit ? pick(counts[d] + 1) : 0));
      std::iota(pages.begin(), pages.end(), 0);
      std::shuffle(pages.begin(), pages.end(), random);
      pages.resize(counts[d]);
      boxes[d].index = pages.data();
      last = *std::max_element(pages.begin(), pages.end());
    }
    extent = last * stride + extent;
  }
  if (extent > limit) return false;
  base += pick(limit - extent + 1);
  out.layout = Layout::box(base, boxes, piece);
  if (dims == 1 && boxes[0].index != nullptr && pick(2)) {
    out.layout = Layout::paged(base, out.pages[0], boxes[0].stride, piece);
  } else if (dims == 1 && boxes[0].index == nullptr && pick(2)) {
    out.layout = Layout::strided(base, boxes[0].count, boxes[0].stride, piece);
  } else if (dims == 2 && boxes[0].index == nullptr && boxes[1].index != nullptr) {
    out.layout = Layout::paged(base, out.pages[1], boxes[1].stride, piece)
                     .repeated(boxes[0].count, boxes[0].stride);
  }
  out.offsets = {base};
  for (const Dim& dim : boxes) {
    std::vector<size_t> next;
    for (size_t offset : out.offsets) {
      for (size_t i = 0; i < dim.count; ++i) {
        next.push_back(offset + (dim.index != nullptr ? dim.index[i] : i) * dim.stride);
      }
    }
    out.offsets = std::move(next);
  }
  std::vector<size_t> starts = std::move(out.offsets);
  out.offsets.clear();
  for (size_t start : starts) {
    for (size_t i = 0; i < piece; ++i) out.offsets.push_back(start + i);
  }
  return true;
}

}  // namespace

void make_box(RandomBox& out, std::mt19937_64& random, size_t bytes, size_t base, size_t limit) {
  while (!try_box(out, random, bytes, base, limit)) {
  }
}

}  // namespace baton

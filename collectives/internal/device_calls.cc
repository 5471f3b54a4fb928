// Copying the memory of calls to and from devices.
#include "collectives/internal/device_calls.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/reduce/reduce.h"

namespace baton::collectives::internal {
namespace {

constexpr size_t kMostIdle = 8;     // blocks that are kept for the next calls
constexpr size_t kMostChosen = 64;  // notes on where calls combined
// Less is there sooner by the host's memory than by as many steps of a device's.
constexpr size_t kLeastExchanged = 256 << 10;

// So many elements in one run. `count` outlives it.
Blocks run_of(const size_t& count) {
  static constexpr size_t kStart = 0;
  return {{&count, 1}, {&kStart, 1}};
}

}  // namespace

DeviceCalls::Staged::~Staged() { owner_.give_back(blocks_); }

DeviceCalls::~DeviceCalls() {
  stop();
  exchange_.reset();
  for (const Block& block : idle_) mesh_.memory().free(block);
}

void DeviceCalls::give_back(std::vector<Block>& blocks) {
  for (const Block& block : blocks) {
    if (idle_.size() < kMostIdle) {
      idle_.push_back(block);
    } else {
      mesh_.memory().free(block);
    }
  }
  blocks.clear();
}

bool DeviceCalls::concerns(const Request& request, const Extents& extents) const {
  if (baton::internal::device_memory() == nullptr) return false;
  const size_t element = size_of(request.type);
  return (extents.in > 0 && !ours(request.in, extents.in * element)) ||
         (extents.out > 0 && !ours(request.out, extents.out * element));
}

bool DeviceCalls::ours(const void* data, size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(data);
  const auto& regions = mesh_.memory().regions();
  return std::any_of(regions.begin(), regions.end(), [&](const executor::Memory::Region& region) {
    const std::byte* base = region.local.base;
    return at >= base && at + bytes <= base + region.local.size;
  });
}

absl::StatusOr<int> DeviceCalls::device_of(const void* data, size_t bytes) {
  const baton::internal::DeviceMemory* const devices = baton::internal::device_memory();
  if (devices == nullptr || bytes == 0 || ours(data, bytes)) return -1;
  const absl::StatusOr<MemoryPlace> place = devices->place(data, bytes);
  if (!place.ok()) return place.status();
  if (place->kind != MemoryKind::kDevice) return -1;
  Ring& ring = rings_[place->device];
  if (ring.copies == nullptr) {
    auto made = devices->staging_ring(place->device, 2 * kPieces * kPiece, false);
    if (!made.ok()) return made.status();
    ring.copies = *std::move(made);
    ring.pieces.resize(2 * kPieces);
  }
  if (absl::Status alive = ring.copies->alive(); !alive.ok()) return alive;
  return place->device;
}

absl::StatusOr<std::byte*> DeviceCalls::host_memory(Staged& staged, size_t bytes) {
  auto best = idle_.end();
  for (auto block = idle_.begin(); block != idle_.end(); ++block) {
    if (block->size >= bytes && (best == idle_.end() || block->size < best->size)) best = block;
  }
  if (best != idle_.end()) {
    staged.blocks_.push_back(*best);
    idle_.erase(best);
    return staged.blocks_.back().data;
  }
  absl::StatusOr<Block> block = mesh_.memory().allocate_for_caller(bytes);
  if (!block.ok()) return block.status();
  staged.blocks_.push_back(*block);
  if (absl::Status status = mesh_.publish_regions(); !status.ok()) return status;
  return block->data;
}

bool DeviceCalls::may_exchange(const Request& request) const {
  return request.collective == Collective::kAllReduce && !request.options->algorithm.has_value() &&
         mesh_.ranks() > 1 && mesh_.ranks() <= devices::DeviceExchange::kMostRanks &&
         request.count * size_of(request.type) >= kLeastExchanged &&
         request.op != ReduceOp::kPreMulSum && executor::kernel_combines(request.type, request.op);
}

bool DeviceCalls::can_exchange(const Request& request) {
  if (sums_ == Sums::kCpus || no_exchange_) return false;
  mesh_.want_all();
  if (!mesh_.all_direct()) return false;
  const size_t bytes = request.count * size_of(request.type);
  const absl::StatusOr<int> from = device_of(request.in, bytes), to = device_of(request.out, bytes);
  if (!from.ok() || !to.ok() || *from < 0 || *from != *to) return false;
  if (exchange_ != nullptr) return exchange_->device() == *from;
  executor::DeviceSums* const sums = sums_of(rings_.at(*from), *from);
  if (sums == nullptr) return false;
  auto made = devices::DeviceExchange::create(
      {.worker = mesh_.worker(),
       .rank = mesh_.rank(),
       .ranks = mesh_.ranks(),
       .peer = [this](uint32_t rank) { return mesh_.member(rank).peer(); },
       .tell = [this](uint32_t rank,
                      const std::string& offer) { mesh_.tell(rank, ControlMessage::kSlab, offer); },
       .told = [this](uint32_t rank) { return std::string_view(mesh_.member(rank).slab); }},
      *from, sums->kernel());
  no_exchange_ = !made.ok();
  if (no_exchange_) return false;
  exchange_ = *std::move(made);
  return true;
}

void DeviceCalls::say_whether(uint64_t sequence, bool can) {
  mesh_.control().on_device[sequence % executor::ControlBlock::kFlags].store(
      2 * sequence + (can ? 1 : 0), std::memory_order_release);
}

std::optional<bool> DeviceCalls::all_can(uint64_t sequence, uint32_t* waits_for) const {
  for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
    if (r == mesh_.rank()) continue;
    const uint64_t said =
        mesh_.member(r).block().on_device[sequence % executor::ControlBlock::kFlags].load(
            std::memory_order_acquire);
    if (said == 2 * sequence) return false;
    const executor::CallDescriptor& ours =
        mesh_.control().calls[sequence % executor::ControlBlock::kCalls];
    const executor::CallDescriptor theirs =
        mesh_.member(r).block().calls[sequence % executor::ControlBlock::kCalls];
    const bool differ = theirs.sequence == sequence && ours.sequence == sequence && theirs != ours;
    if (said == 2 * sequence + 1 && !differ) continue;
    if (waits_for != nullptr) *waits_for = r;
    return std::nullopt;
  }
  return true;
}

void DeviceCalls::exchanged(const executor::Call& call, double seconds) {
  note(Collective::kAllReduce, call.type, call.geometry.count * call.geometry.element_bytes,
       absl::StrFormat("1, by a kernel of CUDA device %d, from device to device: took %.1f us",
                       exchange_->device(), seconds * 1e6));
}

// Once for each region of the communicator's memory, about a second for 2 GiB.
void DeviceCalls::pin_memory(int device) {
  if (device < 0) return;
  Ring& ring = rings_.at(device);
  const auto& regions = mesh_.memory().regions();
  for (; ring.looked_at < regions.size(); ++ring.looked_at) {
    const MemoryRegion& region = regions[ring.looked_at].local;
    auto pin = ring.copies->pin({region.base, region.size});
    if (pin.ok()) ring.pins.emplace_back(absl::MakeSpan(region.base, region.size), *std::move(pin));
  }
}

absl::StatusOr<DeviceCalls::StagedPtr> DeviceCalls::stage(Request& request, bool& in_place) {
  const size_t element = size_of(request.type);
  const size_t reads = in_elements(request, mesh_.rank(), mesh_.ranks());
  const size_t writes = out_elements(request, mesh_.rank(), mesh_.ranks());
  if (request.uneven || !in_place) {
    const bool gathers = request.collective == Collective::kAllGather;
    const bool scatters = request.collective == Collective::kReduceScatter;
    auto staged = stage_blocks(
        request.in, request.uneven && scatters ? request.blocks : run_of(reads), request.out,
        request.uneven && gathers ? request.blocks : run_of(writes), element);
    if (staged.ok() && *staged != nullptr) in_place = false;
    return staged;
  }
  // One of the two is a part of the other.
  auto* const in = static_cast<std::byte*>(const_cast<void*>(request.in));
  auto* const out = static_cast<std::byte*>(request.out);
  std::byte* const first = std::min(in, out);
  std::byte* const end = std::max(in + reads * element, out + writes * element);
  const absl::StatusOr<int> device = device_of(first, static_cast<size_t>(end - first));
  if (!device.ok()) return device.status();
  if (*device < 0) return StagedPtr();
  StagedPtr staged(new Staged(*this));
  const absl::StatusOr<std::byte*> host = host_memory(*staged, static_cast<size_t>(end - first));
  if (!host.ok()) return host.status();
  pin_memory(*device);
  request.in = *host + (in - first);
  request.out = *host + (out - first);
  staged->reads_.push_back({in, *host + (in - first), reads * element});
  staged->writes_.push_back({out, *host + (out - first), writes * element});
  staged->reads_from_ = staged->writes_to_ = *device;
  return staged;
}

absl::Status DeviceCalls::own_input(Request& request, StagedPtr& staged, bool& in_place) {
  const size_t element = size_of(request.type);
  const size_t count = in_elements(request, mesh_.rank(), mesh_.ranks());
  if (count == 0) return absl::OkStatus();
  const bool copied = staged != nullptr && !staged->reads_.empty();
  const bool as_large = request.collective != Collective::kReduceScatter &&
                        out_elements(request, mesh_.rank(), mesh_.ranks()) == count;
  std::byte* to = nullptr;
  if (copied) {
    to = static_cast<std::byte*>(const_cast<void*>(request.in));
  } else if (as_large) {
    to = static_cast<std::byte*>(request.out);
    in_place = true;
  } else {
    if (staged == nullptr) staged.reset(new Staged(*this));
    const absl::StatusOr<std::byte*> host = host_memory(*staged, count * element);
    if (!host.ok()) return host.status();
    to = *host;
    in_place = false;
  }
  const auto* const from = static_cast<const std::byte*>(request.in);
  const auto block = [&](size_t first, size_t elements) {
    const void* const source = from + first * element;
    if (request.type == DataType::kBool) {
      return reduce::fold(request.type, ReduceOp::kOr, to + first * element, {&source, 1},
                          elements);
    }
    reduce::multiply(request.type, to + first * element, source, request.options->factor, elements);
  };
  if (request.uneven) {
    for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
      block(request.blocks.offsets[r], request.blocks.counts[r]);
    }
  } else {
    block(0, count);
  }
  request.in = to;
  return absl::OkStatus();
}

absl::StatusOr<DeviceCalls::StagedPtr> DeviceCalls::stage_point_to_point(bool sends, void*& data,
                                                                         size_t bytes) {
  const void* in = data;
  auto staged = sends ? stage_blocks(in, run_of(bytes), data, {}, 1)
                      : stage_blocks(in, {}, data, run_of(bytes), 1);
  if (sends) data = const_cast<void*>(in);
  return staged;
}

absl::StatusOr<DeviceCalls::StagedPtr> DeviceCalls::stage_blocks(const void*& in,
                                                                 const Blocks& send, void*& out,
                                                                 const Blocks& receive,
                                                                 size_t element) {
  const size_t reads = extent(send) * element, writes = extent(receive) * element;
  const absl::StatusOr<int> from = device_of(in, reads);
  if (!from.ok()) return from.status();
  const absl::StatusOr<int> to = device_of(out, writes);
  if (!to.ok()) return to.status();
  if (*from < 0 && *to < 0) return StagedPtr();
  StagedPtr staged(new Staged(*this));
  const auto runs = [&](std::byte* device, std::byte* host, const Blocks& blocks,
                        std::vector<baton::internal::CopyRun>& list) {
    for (size_t r = 0; r < blocks.counts.size(); ++r) {
      const size_t at = blocks.offsets[r] * element;
      if (blocks.counts[r] > 0)
        list.push_back({device + at, host + at, blocks.counts[r] * element});
    }
  };
  if (*from >= 0) {
    const absl::StatusOr<std::byte*> host = host_memory(*staged, reads);
    if (!host.ok()) return host.status();
    runs(static_cast<std::byte*>(const_cast<void*>(in)), *host, send, staged->reads_);
    in = *host;
  }
  if (*to >= 0) {
    const absl::StatusOr<std::byte*> host = host_memory(*staged, writes);
    if (!host.ok()) return host.status();
    runs(static_cast<std::byte*>(out), *host, receive, staged->writes_);
    out = *host;
  }
  pin_memory(*from);
  pin_memory(*to);
  staged->reads_from_ = *from;
  staged->writes_to_ = *to;
  return staged;
}

executor::DeviceSums* DeviceCalls::sums_of(Ring& ring, int device) {
  // A build without kernels stays without them; any other error may be gone next time.
  if (ring.sums != nullptr || absl::IsUnimplemented(ring.no_sums)) return ring.sums.get();
  auto made = baton::internal::device_memory()->sums(device);
  if (made.ok()) {
    ring.sums = std::make_unique<executor::DeviceSums>(*std::move(made), mesh_.memory());
  } else {
    ring.no_sums = made.status();
  }
  return ring.sums.get();
}

void DeviceCalls::choose_sums(const Staged& staged, executor::Call& call) {
  const executor::Geometry& geometry = call.geometry;
  const Collective what = geometry.collective;
  if (what != Collective::kAllReduce && what != Collective::kReduceScatter &&
      what != Collective::kReduce) {
    return;
  }
  if (staged.reads_.empty() && staged.writes_.empty()) return;  // nothing on devices
  const size_t bytes = geometry.count * geometry.element_bytes *
                       (what == Collective::kReduceScatter ? mesh_.ranks() : 1);
  const auto by_cpus = [&](const std::string& why) { note(what, call.type, bytes, why); };
  if (sums_ == Sums::kCpus) return by_cpus("by CPUs, as staging.sums says");
  if (!executor::kernel_combines(call.type, call.op)) {
    return by_cpus(absl::StrFormat("by CPUs: the kernel has no %s of %s",
                                   std::string(name_of(call.op)), std::string(name_of(call.type))));
  }
  const bool reads = !staged.reads_.empty();
  const int device = reads ? staged.reads_from_ : staged.writes_to_;
  Ring& ring = rings_.at(device);
  executor::DeviceSums* const sums = sums_of(ring, device);
  if (sums == nullptr) return by_cpus(absl::StrCat("by CPUs: ", ring.no_sums.message()));
  // The device has the call's input, but not multiplied.
  const bool original = reads && call.op != ReduceOp::kPreMulSum;
  std::vector<bool> in_place;
  for (const Mesh::Member& member : mesh_.members()) in_place.push_back(member.direct != nullptr);
  const executor::SumPrices prices =
      sums->prices(*call.programs, geometry, call.type, call.op, in_place, original);
  if (prices.sums == 0) return by_cpus("none at this rank");
  if (prices.most_sources > executor::DeviceSums::kMostSources) {
    return by_cpus(absl::StrFormat("by CPUs: the kernel combines %u vectors at a time, not %u",
                                   executor::DeviceSums::kMostSources, prices.most_sources));
  }
  const bool kernel = sums_ == Sums::kKernel || prices.by_kernel < prices.by_cpu;
  const std::string cpus = absl::StrFormat("by CPUs %.1f us", prices.by_cpu * 1e6);
  const std::string device_way =
      absl::StrFormat("by a kernel of CUDA device %d %.1f us", device, prices.by_kernel * 1e6);
  note(what, call.type, bytes,
       absl::StrFormat("%u, %s, %s%s", prices.sums, kernel ? device_way : cpus,
                       kernel ? cpus : device_way,
                       sums_ == Sums::kKernel ? " (staging.sums=kernel)" : ""));
  if (!kernel) return;
  call.sums = sums;
  if (original) {
    const baton::internal::CopyRun& run = staged.reads_.front();
    call.input = {run.device, run.host, run.bytes};
  }
}

void DeviceCalls::note(Collective collective, DataType type, size_t bytes, std::string why) {
  const auto same = std::find_if(chosen_.begin(), chosen_.end(), [&](const Chosen& one) {
    return one.collective == collective && one.type == type && one.bytes == bytes;
  });
  if (same != chosen_.end()) {
    same->why = std::move(why);
    return;
  }
  if (chosen_.size() == kMostChosen) chosen_.erase(chosen_.begin());
  chosen_.push_back({collective, type, bytes, std::move(why)});
}

std::string DeviceCalls::explain_sums(Collective collective, size_t bytes) const {
  std::string out;
  for (const Chosen& one : chosen_) {
    if (one.collective != collective || one.bytes != bytes) continue;
    absl::StrAppend(&out, "sums of ", std::string(name_of(one.type)), ": ", one.why, "\n");
  }
  return out;
}

bool DeviceCalls::step(Staged& staged, CopyDirection direction) {
  const bool to_host = direction == CopyDirection::kToHost;
  const std::vector<baton::internal::CopyRun>& runs = to_host ? staged.reads_ : staged.writes_;
  Ring& ring = rings_.at(to_host ? staged.reads_from_ : staged.writes_to_);
  const size_t first = to_host ? 0 : kPieces;
  for (size_t i = first; i < first + kPieces && staged.status_.ok(); ++i) {
    if (staged.run_ == runs.size()) break;
    Ring::Piece& piece = ring.pieces[i];
    if (piece.owner != nullptr) continue;
    const baton::internal::CopyRun& run = runs[staged.run_];
    const size_t bytes = std::min(kPiece, run.bytes - staged.at_);
    std::byte* const host = run.host + staged.at_;
    const bool straight = std::any_of(ring.pins.begin(), ring.pins.end(), [&](const auto& pin) {
      return host >= pin.first.data() && host + bytes <= pin.first.data() + pin.first.size();
    });
    piece = {&staged, straight ? nullptr : host, bytes};
    const baton::internal::CopyRun copy{run.device + staged.at_,
                                        straight ? host : ring.copies->memory().data() + i * kPiece,
                                        bytes};
    if (!to_host && !straight) std::memcpy(copy.host, host, bytes);
    ring.copies->copy(direction, i, false, {&copy, 1});
    ++staged.open_;
    staged.at_ += bytes;
    if (staged.at_ == run.bytes) {
      staged.at_ = 0;
      ++staged.run_;
    }
  }
  collect(ring);
  return staged.open_ > 0 || (staged.status_.ok() && staged.run_ < runs.size());
}

// Takes what has ended; pieces of other calls too.
void DeviceCalls::collect(Ring& ring) {
  ring.copies->progress([&](uint64_t index, const absl::Status& status) {
    Ring::Piece& piece = ring.pieces[index];
    Staged& owner = *piece.owner;
    if (status.ok()) {
      if (index < kPieces && piece.host != nullptr) {
        std::memcpy(piece.host, ring.copies->memory().data() + index * kPiece, piece.bytes);
      }
      bytes_ += piece.bytes;
    }
    owner.status_.Update(status);
    --owner.open_;
    piece.owner = nullptr;
  });
}

void DeviceCalls::begin_copy_in(Staged& staged) {
  ++calls_;
  staged.run_ = staged.at_ = 0;
  staged.status_ = absl::OkStatus();
}

std::optional<absl::Status> DeviceCalls::copied_in(Staged& staged) {
  if (!staged.reads_.empty() && step(staged, CopyDirection::kToHost)) return std::nullopt;
  return staged.status_;
}

absl::Status DeviceCalls::copy_in(Staged& staged, Time deadline,
                                  const std::function<absl::Status()>& pause) {
  begin_copy_in(staged);
  while (!copied_in(staged).has_value()) {
    if (staged.status_.ok() && mesh_.now() > deadline) {
      staged.status_ = absl::DeadlineExceededError(absl::StrFormat(
          "CUDA device %d did not copy the call's input in time", staged.reads_from_));
    }
    staged.status_.Update(pause());
  }
  return staged.status_;
}

void DeviceCalls::begin_copy_out(Staged& staged) {
  staged.run_ = staged.at_ = 0;
  staged.status_ = absl::OkStatus();
}

std::optional<absl::Status> DeviceCalls::copy_out(Staged& staged) {
  if (!staged.writes_.empty() && step(staged, CopyDirection::kToDevice)) return std::nullopt;
  return staged.status_;
}

void DeviceCalls::stop() {
  if (exchange_ != nullptr) exchange_->stop();
  for (auto& [device, ring] : rings_) {
    if (ring.copies == nullptr) continue;
    for (size_t i = 0; i < ring.pieces.size(); ++i) {
      if (ring.pieces[i].owner != nullptr) ring.copies->drop(i);
    }
    while (ring.copies->busy()) collect(ring);
    if (ring.sums != nullptr) ring.sums->stop();
  }
}

std::string DeviceCalls::explain() const {
  std::string out;
  for (const auto& [device, ring] : rings_) {
    if (ring.copies == nullptr) continue;
    absl::StrAppend(&out, "memory of CUDA device ", device, ": staged through ",
                    ring.copies->memory().size() >> 20,
                    " MiB of pinned memory by copy engines; sums ",
                    ring.sums != nullptr ? "by CPUs or by a kernel" : "by CPUs", "\n");
  }
  return out;
}

}  // namespace baton::collectives::internal

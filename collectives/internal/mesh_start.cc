// How a mesh comes up: the worker, the other ranks' addresses, and a link to each of them.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "collectives/internal/mesh.h"
#include "transport/address.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {

using executor::ControlBlock;
using executor::TransferLink;

namespace {

// All slots of a rank together stay below this.
constexpr size_t kSlotBudget = size_t{512} << 20;
constexpr size_t kLeastSlot = 64 << 10;
constexpr const char* kAckHold = "2000";  // us

std::string host_name() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

// Ranks per node if the hosts come in equal consecutive groups, else 1.
uint32_t count_node_size(const std::vector<RankInfo>& rank_infos) {
  uint32_t size = 1;
  while (size < rank_infos.size() && rank_infos[size].host == rank_infos[0].host) ++size;
  for (size_t i = size; i < rank_infos.size(); ++i) {
    const bool starts = i % size == 0;
    if ((rank_infos[i].host == rank_infos[i - 1].host) == starts) return 1;
  }
  return size;
}

}  // namespace

Mesh::Mesh(CommunicatorOptions& options, Listener& listener)
    : options_(options),
      listener_(listener),
      rank_(static_cast<uint32_t>(options.rank)),
      ranks_(static_cast<uint32_t>(options.ranks)),
      host_(host_name()),
      members_(ranks_) {}

absl::Status Mesh::start() {
  if (absl::Status status = open(); !status.ok()) return status;
  if (ranks_ > 1) {
    if (absl::Status status = meet(); !status.ok()) return status;
    if (absl::Status status = connect_all(); !status.ok()) return status;
  }
  for (const Member& member : members_) any_transfer_ |= member.transfer != nullptr;
  count_neighbours();
  return absl::OkStatus();
}

absl::Status Mesh::open() {
  while (options_.slot_bytes > kLeastSlot &&
         (ranks_ - 1) * options_.slot_bytes * TransferLink::kSlots * executor::kLanes >
             kSlotBudget) {
    options_.slot_bytes /= 2;
  }
  if (options_.slot_bytes < kLeastSlot || options_.slot_bytes % 4096 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("slots of %u bytes are not possible: use a multiple of 4096, 65536 or more",
                        options_.slot_bytes));
  }
  options_.worker.name = absl::StrCat(options_.name, ".", rank_);
  if (options_.worker.listen_host.empty() && ranks_ > 1) {
    options_.worker.listen_host = listen_host_for(options_.rendezvous);
  }
  // No rank waits for acknowledgements of small messages: they are copied when they are sent, and
  // slots go back by other words.
  for (const Setting& known : known_settings()) {
    SettingValues& settings = options_.worker.settings;
    const bool given = std::any_of(settings.begin(), settings.end(),
                                   [&](const auto& one) { return one.first == known.name; });
    if (known.name.ends_with(".ack_us") && !given) settings.emplace_back(known.name, kAckHold);
  }
  absl::StatusOr<std::unique_ptr<Worker>> made = Worker::create(options_.worker);
  if (!made.ok()) return made.status();
  worker_ = *std::move(made);
  absl::StatusOr<std::unique_ptr<executor::Memory>> pool = executor::Memory::create(*worker_);
  if (!pool.ok()) return pool.status();
  memory_ = *std::move(pool);
  absl::StatusOr<Block> block = memory_->allocate(ControlBlock::bytes(ranks_));
  if (!block.ok()) return block.status();
  control_memory_ = *block;
  control_ = reinterpret_cast<ControlBlock*>(control_memory_.data);
  return absl::OkStatus();
}

void Mesh::count_neighbours() {
  uint32_t here = 1;
  for (const RankInfo& info : rank_infos_) {
    here += info.rank != rank_ && info.host == host_ ? 1 : 0;
  }
  crowded_ = here + (options_.background ? here : 0) > std::thread::hardware_concurrency();
  if (options_.node_size > 0) {
    node_size_ = options_.node_size;
  } else if (!rank_infos_.empty()) {
    node_size_ = count_node_size(rank_infos_);
  }
}

absl::Status Mesh::meet() {
  absl::StatusOr<ClusterKey> key = options_.worker.key
                                       ? absl::StatusOr<ClusterKey>(*options_.worker.key)
                                       : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  absl::StatusOr<RemoteRegion> region = worker_->remote_region(control_memory_.region);
  if (!region.ok()) return region.status();
  RankInfo info;
  info.rank = rank_;
  info.ranks = ranks_;
  info.generation = options_.generation;
  info.version = kCollectivesVersion;
  info.pid = static_cast<uint32_t>(getpid());
  info.host = host_;
  info.worker_address = worker_->address();
  info.payload = region->encode();
  const uint64_t settings[2] = {control_memory_.offset, options_.slot_bytes};
  info.payload.append(reinterpret_cast<const char*>(settings), sizeof settings);
  absl::StatusOr<std::vector<RankInfo>> met =
      collectives::meet(options_.rendezvous, *key, info, options_.start_timeout);
  if (!met.ok()) return met.status();
  rank_infos_ = *std::move(met);
  for (const RankInfo& other : rank_infos_) {
    if (other.rank == rank_) continue;
    if (absl::Status status = take_rank_info(other); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Mesh::take_rank_info(const RankInfo& info) {
  Member& member = members_[info.rank];
  member.label = absl::StrFormat("rank %u (%s, pid %u)", info.rank, info.host, info.pid);
  absl::StatusOr<Address> address = Address::decode(info.worker_address);
  if (!address.ok()) return address.status();
  member.uid = address->uid;
  uint64_t settings[2];
  if (info.payload.size() != RemoteRegion::kEncodedBytes + sizeof settings) {
    return absl::InvalidArgumentError(
        absl::StrCat(member.label, " sent rank info of another form"));
  }
  absl::StatusOr<RemoteRegion> region =
      RemoteRegion::decode(std::string_view(info.payload).substr(0, RemoteRegion::kEncodedBytes));
  if (!region.ok()) return region.status();
  member.control = *region;
  std::memcpy(settings, info.payload.data() + RemoteRegion::kEncodedBytes, sizeof settings);
  member.control_offset = settings[0];
  if (settings[1] != options_.slot_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has slots of %u bytes, rank %u of %u: use the same size on all ranks",
                        member.label, settings[1], rank_, options_.slot_bytes));
  }
  return absl::OkStatus();
}

// The lower rank of each pair connects.
absl::Status Mesh::connect_all() {
  for (uint32_t r = rank_ + 1; r < ranks_; ++r) {
    absl::StatusOr<PeerId> peer = worker_->connect(rank_infos_[r].worker_address);
    if (!peer.ok()) return peer.status();
    members_[r].peer = *peer;
    members_[r].known = true;
  }
  const Time end = base::deadline_after(now(), options_.start_timeout);
  while (true) {
    const bool moved = worker_->progress();
    drain();
    if (absl::Status status = listener_.status(); !status.ok()) return status;
    uint32_t waiting = 0;
    for (uint32_t r = 0; r < ranks_; ++r) {
      if (r == rank_ || members_[r].ready) continue;
      if (absl::Status status = link_up(r); !status.ok()) return status;
      waiting += members_[r].ready ? 0 : 1;
    }
    if (waiting == 0) {
      // The others wait for our message, and the caller may now compute for a while.
      while (worker_->stats().open_transfers > 0 && now() < end) worker_->progress();
      return absl::OkStatus();
    }
    if (now() >= end) {
      std::vector<std::string> missing;
      for (uint32_t r = 0; r < ranks_; ++r) {
        if (r != rank_ && !members_[r].ready) missing.push_back(members_[r].label);
      }
      return absl::DeadlineExceededError(absl::StrFormat(
          "rank %u could not connect to %s in %d s", rank_, absl::StrJoin(missing, ", "),
          std::chrono::duration_cast<std::chrono::seconds>(options_.start_timeout).count()));
    }
    if (!moved) nap(std::chrono::milliseconds(2));
  }
}

absl::Status Mesh::link_up(uint32_t rank) {
  Member& member = members_[rank];
  if (!member.known || !member.up) return absl::OkStatus();
  if (member.we_can_view < 0) {
    absl::StatusOr<RemoteView> view = worker_->view(member.peer, member.control);
    if (absl::IsUnavailable(view.status())) return absl::OkStatus();
    const bool fits = view.ok() && member.control_offset <= view->size &&
                      ControlBlock::bytes(ranks_) <= view->size - member.control_offset;
    member.we_can_view = fits ? 1 : 0;
    if (fits) {
      member.view = *std::move(view);
      member.view.data += member.control_offset;
    }
    tell(rank, ControlMessage::kView, fits ? "1" : "0");
  }
  if (member.can_view < 0) return absl::OkStatus();
  if (member.can_view == 1 && member.we_can_view == 1) {
    auto link = std::make_unique<executor::DirectLink>(executor::DirectLink::Ends{
        *worker_, *memory_, member.peer, rank_, rank, *control_, member.view, options_.slot_bytes});
    member.direct = link.get();
    member.link = std::move(link);
    member.ready = true;
    return absl::OkStatus();
  }
  if (member.transfer == nullptr) {
    absl::StatusOr<std::unique_ptr<TransferLink>> link =
        TransferLink::create(*worker_, *memory_, member.peer, options_.slot_bytes);
    if (!link.ok()) return link.status();
    member.transfer = link->get();
    member.link = *std::move(link);
    tell(rank, ControlMessage::kOffer, member.transfer->offer().encode());
  }
  if (member.offer.empty()) return absl::OkStatus();
  absl::StatusOr<TransferLink::Offer> theirs = TransferLink::Offer::decode(member.offer);
  if (!theirs.ok()) return theirs.status();
  member.transfer->set_offer(*theirs);
  member.ready = true;
  return absl::OkStatus();
}

}  // namespace baton::collectives::internal

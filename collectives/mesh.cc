// Meeting the other ranks, and a link to each of them.
#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "collectives/communicator_impl.h"
#include "transport/address.h"

namespace baton {

using collectives::ControlBlock;
using collectives::DirectLink;
using collectives::Mail;
using collectives::RankCard;
using collectives::TransferLink;

namespace {

// All slots of a rank together stay below this.
constexpr size_t kSlotBudget = size_t{512} << 20;
constexpr size_t kLeastSlot = 64 << 10;
constexpr Time kLeaving = std::chrono::milliseconds(50);

std::string host_name() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

// Ranks per node if the hosts come in equal consecutive groups, else 1.
uint32_t count_node_size(const std::vector<RankCard>& cards) {
  uint32_t size = 1;
  while (size < cards.size() && cards[size].host == cards[0].host) ++size;
  for (size_t i = size; i < cards.size(); ++i) {
    const bool starts = i % size == 0;
    if ((cards[i].host == cards[i - 1].host) == starts) return 1;
  }
  return size;
}

}  // namespace

Communicator::Impl::Impl(CommunicatorOptions communicator_options)
    : options(std::move(communicator_options)),
      rank(static_cast<uint32_t>(options.rank)),
      ranks(static_cast<uint32_t>(options.ranks)),
      host(host_name()),
      members(ranks),
      slots(std::make_unique<WorkSlot[]>(kSlots)),
      ballots(ranks) {
  finished.reserve(kSlots);
  in_flight.reserve(kSlots);
  choices.reserve(64);
}

Communicator::Impl::~Impl() {
  if (background.joinable()) {
    stop.store(true);
    {
      std::lock_guard lock(mutex);
      background_wakes.notify_all();
    }
    background.join();
  }
  leave();
  executor.reset();
  for (Member& member : members) member.link.reset();
  for (Member& member : members) member.view = RemoteView{};
  if (memory != nullptr && control_memory.data != nullptr) memory->free(control_memory);
  memory.reset();
}

absl::Status Communicator::Impl::start() {
  if (options.ranks < 1 || options.ranks > 4096 || options.rank < 0 ||
      options.rank >= options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d of %d makes no sense: ranks count from 0, and there may be 4096",
                        options.rank, options.ranks));
  }
  while (options.slot_bytes > kLeastSlot &&
         (ranks - 1) * options.slot_bytes * TransferLink::kSlots * collectives::kAllLanes >
             kSlotBudget) {
    options.slot_bytes /= 2;
  }
  if (options.slot_bytes < kLeastSlot || options.slot_bytes % 4096 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("slots of %u bytes make no sense: use a multiple of 4096, 65536 or more",
                        options.slot_bytes));
  }
  options.worker.name = absl::StrCat(options.name, ".", rank);
  absl::StatusOr<std::unique_ptr<Worker>> made = Worker::create(options.worker);
  if (!made.ok()) return made.status();
  worker = *std::move(made);
  absl::StatusOr<std::unique_ptr<collectives::Memory>> pool = collectives::Memory::create(*worker);
  if (!pool.ok()) return pool.status();
  memory = *std::move(pool);
  absl::StatusOr<Block> block = memory->allocate(ControlBlock::bytes(ranks));
  if (!block.ok()) return block.status();
  control_memory = *block;
  control = reinterpret_cast<ControlBlock*>(control_memory.data);
  recorder = std::make_unique<collectives::FlightRecorder>(rank);

  if (ranks > 1) {
    if (absl::Status status = meet(); !status.ok()) return status;
    if (absl::Status status = connect_all(); !status.ok()) return status;
  }
  std::vector<collectives::Link*> links;
  for (Member& member : members) {
    links.push_back(member.link.get());
    any_transfer |= member.transfer != nullptr;
  }
  executor = std::make_unique<collectives::Executor>(rank, std::move(links), memory.get(),
                                                     worker->clock(), recorder.get());
  uint32_t here = 1;
  for (const RankCard& card : cards) here += card.rank != rank && card.host == host ? 1 : 0;
  crowded = here + (options.background ? here : 0) > std::thread::hardware_concurrency();
  if (options.node_size > 0) {
    node_size = options.node_size;
  } else if (!cards.empty()) {
    node_size = count_node_size(cards);
  }
  collectives::CostParameters cost;
  cost.node_size = node_size;
  cost.cores_move_local = true;
  model = std::make_unique<collectives::CostModel>(cost, options.slot_bytes, collectives::kLanes);
  if (options.calibrate) {
    if (absl::Status status = calibrate(); !status.ok()) return status;
  }
  if (options.background) background = std::thread([this] { run_background(); });
  return absl::OkStatus();
}

absl::Status Communicator::Impl::meet() {
  absl::StatusOr<ClusterKey> key = options.worker.key
                                       ? absl::StatusOr<ClusterKey>(*options.worker.key)
                                       : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  absl::StatusOr<RemoteRegion> region = worker->remote_region(control_memory.region);
  if (!region.ok()) return region.status();
  RankCard card;
  card.rank = rank;
  card.ranks = ranks;
  card.generation = options.generation;
  card.version = collectives::kCollectivesVersion;
  card.pid = static_cast<uint32_t>(getpid());
  card.host = host;
  card.worker_address = worker->address();
  card.payload = region->encode();
  const uint64_t settings[2] = {control_memory.offset, options.slot_bytes};
  card.payload.append(reinterpret_cast<const char*>(settings), sizeof settings);
  absl::StatusOr<std::vector<RankCard>> met =
      collectives::meet(options.rendezvous, *key, card, options.start_timeout);
  if (!met.ok()) return met.status();
  cards = *std::move(met);
  for (const RankCard& other : cards) {
    if (other.rank == rank) continue;
    Member& member = members[other.rank];
    member.label = absl::StrFormat("rank %u (%s, pid %u)", other.rank, other.host, other.pid);
    absl::StatusOr<Address> address = Address::decode(other.worker_address);
    if (!address.ok()) return address.status();
    member.uid = address->uid;
    if (other.payload.size() != RemoteRegion::kEncodedBytes + sizeof settings) {
      return absl::InvalidArgumentError(absl::StrCat(member.label, " sent a card of another form"));
    }
    absl::StatusOr<RemoteRegion> control_region = RemoteRegion::decode(
        std::string_view(other.payload).substr(0, RemoteRegion::kEncodedBytes));
    if (!control_region.ok()) return control_region.status();
    member.control = *control_region;
    uint64_t theirs[2];
    std::memcpy(theirs, other.payload.data() + RemoteRegion::kEncodedBytes, sizeof theirs);
    member.control_offset = theirs[0];
    if (theirs[1] != options.slot_bytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s has slots of %u bytes, rank %u of %u: all must be given the same",
                          member.label, theirs[1], rank, options.slot_bytes));
    }
  }
  return absl::OkStatus();
}

// The lower rank of each pair connects.
absl::Status Communicator::Impl::connect_all() {
  for (uint32_t r = rank + 1; r < ranks; ++r) {
    absl::StatusOr<PeerId> peer = worker->connect(cards[r].worker_address);
    if (!peer.ok()) return peer.status();
    members[r].peer = *peer;
    members[r].known = true;
  }
  const Time end = now() + options.start_timeout;
  while (true) {
    const bool moved = worker->progress();
    drain();
    if (!broken.ok()) return broken;
    uint32_t waiting = 0;
    for (uint32_t r = 0; r < ranks; ++r) {
      if (r == rank || members[r].ready) continue;
      if (absl::Status status = link_up(members[r]); !status.ok()) return status;
      waiting += members[r].ready ? 0 : 1;
    }
    if (waiting == 0) {
      // The others wait for our mail, and the caller may now compute for a while.
      while (worker->stats().open_transfers > 0 && now() < end) worker->progress();
      return absl::OkStatus();
    }
    if (now() >= end) {
      std::vector<std::string> missing;
      for (uint32_t r = 0; r < ranks; ++r) {
        if (r != rank && !members[r].ready) missing.push_back(members[r].label);
      }
      return absl::DeadlineExceededError(absl::StrFormat(
          "rank %u could not connect to %s in %d s", rank, absl::StrJoin(missing, ", "),
          std::chrono::duration_cast<std::chrono::seconds>(options.start_timeout).count()));
    }
    if (!moved) nap(std::chrono::milliseconds(2));
  }
}

absl::Status Communicator::Impl::link_up(Member& member) {
  if (!member.known || !member.up) return absl::OkStatus();
  if (member.we_can_view < 0) {
    absl::StatusOr<RemoteView> view = worker->view(member.peer, member.control);
    if (absl::IsUnavailable(view.status())) return absl::OkStatus();
    const bool fits = view.ok() && member.control_offset <= view->size &&
                      ControlBlock::bytes(ranks) <= view->size - member.control_offset;
    member.we_can_view = fits ? 1 : 0;
    if (fits) {
      member.view = *std::move(view);
      member.view.data += member.control_offset;
    }
    tell(member, Mail::kView, fits ? "1" : "0");
  }
  if (member.can_view < 0) return absl::OkStatus();
  if (member.can_view == 1 && member.we_can_view == 1) {
    auto link = std::make_unique<DirectLink>(DirectLink::Ends{*worker, *memory, member.peer, rank,
                                                              rank_of(member), *control,
                                                              member.view, options.slot_bytes});
    member.direct = link.get();
    member.link = std::move(link);
    member.ready = true;
    return absl::OkStatus();
  }
  if (member.transfer == nullptr) {
    absl::StatusOr<std::unique_ptr<TransferLink>> link =
        TransferLink::create(*worker, *memory, member.peer, options.slot_bytes);
    if (!link.ok()) return link.status();
    absl::StatusOr<TransferLink::Offer> offer = (*link)->offer();
    if (!offer.ok()) return offer.status();
    member.transfer = link->get();
    member.link = *std::move(link);
    tell(member, Mail::kOffer, offer->encode());
  }
  if (member.offer.empty()) return absl::OkStatus();
  absl::StatusOr<TransferLink::Offer> theirs = TransferLink::Offer::decode(member.offer);
  if (!theirs.ok()) return theirs.status();
  member.transfer->set_offer(*theirs);
  member.ready = true;
  return absl::OkStatus();
}

absl::Status Communicator::Impl::publish_regions() {
  const auto& regions = memory->regions();
  for (; published_regions < regions.size(); ++published_regions) {
    if (published_regions >= ControlBlock::kMaxRegions) {
      return absl::ResourceExhaustedError(
          "a communicator can have 512 slabs of memory: allocate larger buffers, fewer of them");
    }
    absl::StatusOr<RemoteRegion> region = worker->remote_region(regions[published_regions].local);
    if (!region.ok()) return region.status();
    const std::string bytes = region->encode();
    std::memcpy(control->regions[published_regions].bytes, bytes.data(), bytes.size());
    control->region_count.store(static_cast<uint32_t>(published_regions + 1),
                                std::memory_order_release);
  }
  return absl::OkStatus();
}

Communicator::Impl::Member* Communicator::Impl::member_of(PeerId peer) {
  for (Member& member : members) {
    if (member.known && member.peer == peer) return &member;
  }
  return nullptr;
}

// Says goodbye, so that nobody takes the silence for a death, and waits a moment for the goodbyes
// of others: a connection that is closed with unread bytes in it takes our last words with it.
void Communicator::Impl::leave() {
  if (worker == nullptr || ranks == 1) return;
  leaving = true;
  tell_all(Mail::kBye, "");
  const Time end = now() + kLeaving;
  while (now() < end) {
    const bool any = worker->progress();
    drain();
    bool alone = worker->stats().open_transfers == 0;
    for (const Member& member : members) alone &= !member.up || member.bye;
    if (alone) return;
    if (!any) nap(std::chrono::milliseconds(1));
  }
}

}  // namespace baton

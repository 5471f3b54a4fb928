// Starts a group: its members, and links to those that are needed.
#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/internal/mesh.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {

using executor::ControlBlock;
using executor::Outbox;
using executor::TransferLink;

namespace {

constexpr size_t kLeastSlot = 64 << 10;
// Groups of up to so many ranks connect all of them at once, larger ones those at distances that
// are powers of two: whom schedules in rounds talk to.
constexpr uint32_t kConnectAll = 8;
constexpr uint32_t kMostRanks = 4096;

// A rank's request for a link; the encoded regions and the offer follow.
struct Join {
  uint32_t rank = 0;
  uint32_t ranks = 0;
  uint64_t digest = 0;      // of the members
  uint64_t slot_bytes = 0;  // and, in its low bits, what else must be equal: options_word()
  uint64_t control_offset = 0;
  uint64_t outbox_offset = 0;
};

// Slots are whole pages. Of the defaults nothing is to be seen.
uint64_t options_word(const CommunicatorOptions& options) {
  return options.slot_bytes | (options.tune ? 0 : 1) | (options.ordered ? 2 : 0);
}
std::string options_text(uint64_t word) {
  return absl::StrFormat("slots of %u bytes, %stuned, %sordered", word & ~uint64_t{4095},
                         word & 1 ? "not " : "", word & 2 ? "" : "not ");
}

// Ranks per node if the hosts come in equal consecutive groups, else 1.
uint32_t count_node_size(const std::vector<std::string>& hosts) {
  uint32_t size = 1;
  while (size < hosts.size() && hosts[size] == hosts[0]) ++size;
  for (size_t i = size; i < hosts.size(); ++i) {
    const bool starts = i % size == 0;
    if ((hosts[i] == hosts[i - 1]) == starts) return 1;
  }
  return size;
}

uint64_t digest_of(absl::Span<const Handle> handles) {
  uint64_t hash = 14695981039346656037u;
  for (const Handle& handle : handles) {
    for (const uint8_t byte : handle.uid().bytes) hash = (hash ^ byte) * 1099511628211u;
  }
  return hash;
}

bool near_by(uint32_t a, uint32_t b, uint32_t ranks) {
  if (ranks <= kConnectAll) return true;
  const uint32_t distance = a < b ? b - a : a - b;
  const auto power = [](uint32_t value) { return (value & (value - 1)) == 0; };
  return power(distance) || power(ranks - distance);
}

}  // namespace

absl::Status Mesh::check(absl::Span<const Handle> handles, uint64_t id, uint32_t& rank) const {
  if (handles.empty() || handles.size() > kMostRanks) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a group of %u ranks is not possible: there may be 1 to %u", handles.size(), kMostRanks));
  }
  if (id == 0) {
    return absl::InvalidArgumentError(
        "a group needs a uuid that is not 0 and that none of its members has used before");
  }
  if (options_.slot_bytes < kLeastSlot || options_.slot_bytes % 4096 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("slots of %u bytes are not possible: use a multiple of 4096, 65536 or more",
                        options_.slot_bytes));
  }
  std::map<std::array<uint8_t, 16>, size_t> places;
  bool here = false;
  for (size_t r = 0; r < handles.size(); ++r) {
    if (absl::Status status = EndpointImpl::check(handles[r]); !status.ok()) {
      return absl::Status(status.code(), absl::StrFormat("rank %u: %s", r, status.message()));
    }
    const WorkerUid uid = handles[r].uid();
    const auto [found, fresh] = places.emplace(uid.bytes, r);
    if (!fresh) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "ranks %u and %u have the same handle (%s): every process joins a group once",
          found->second, r, handles[r].label()));
    }
    if (uid == endpoint_.uid()) {
      here = true;
      rank = static_cast<uint32_t>(r);
    }
  }
  if (!here) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the handle of this process (%s) is not among the %u of the group",
                        endpoint_.handle().label(), handles.size()));
  }
  return absl::OkStatus();
}

absl::Status Mesh::enter(absl::Span<const Handle> handles, uint64_t id, uint32_t rank,
                         EndpointImpl::Group& group, bool eager, Time start_timeout) {
  auto state = std::make_unique<State>(endpoint_);
  absl::StatusOr<Block> block = memory().allocate(sizeof(ControlBlock));
  if (!block.ok()) return block.status();
  state->control_memory = *block;
  state->control = reinterpret_cast<ControlBlock*>(block->data);
  if (absl::Status status = publish_regions(); !status.ok()) return status;
  if (absl::Status status = endpoint_.add_group(id, group); !status.ok()) return status;
  rank_ = rank;
  ranks_ = static_cast<uint32_t>(handles.size());
  id_ = state->id = id;
  state->handles.assign(handles.begin(), handles.end());
  state->digest = digest_of(handles);
  state->members = std::vector<Member>(ranks_);
  state->pending.resize(ranks_);
  expects_direct_ = true;
  for (uint32_t r = 0; r < ranks_; ++r) {
    Member& member = state->members[r];
    member.label =
        absl::StrFormat("rank %u (%s, pid %u)", r, EndpointImpl::host_name_of(handles[r]),
                        EndpointImpl::pid_of(handles[r]));
    if (r == rank_) continue;
    member.process = &endpoint_.process(handles[r]);
    state->ranks[member.process] = r;
    state->pending[r] = std::make_unique<PendingLink>(*this, r);
    expects_direct_ &= endpoint_.maps_memory(handles[r]);
  }
  state->control->sleeping.store(endpoint_.sleepers(), std::memory_order_relaxed);
  state_ = std::move(state);
  count_neighbours();
  starting_ = connecting_ = transfers_ = 0;
  first_.assign(ranks_, false);
  start_timeout_ = start_timeout;
  start_by_ = base::deadline_after(now(), start_timeout);
  for (uint32_t r = 0; eager && r < ranks_; ++r) {
    first_[r] = r != rank_ && near_by(r, rank_, ranks_);
    starting_ += first_[r] ? 1 : 0;
  }
  return absl::OkStatus();
}

void Mesh::count_neighbours() {
  uint32_t here = 0;
  std::vector<std::string> hosts;
  for (const Handle& handle : state_->handles) {
    hosts.push_back(EndpointImpl::host_of(handle));
    here += hosts.back() == EndpointImpl::host_of(endpoint_.handle()) ? 1 : 0;
  }
  crowded_ = here + (endpoint_.background() ? here : 0) > std::thread::hardware_concurrency();
  node_size_ = options_.node_size > 0 ? options_.node_size : count_node_size(hosts);
}

void Mesh::want(uint32_t rank) {
  Member& member = state_->members[rank];
  if (member.wanted || rank == rank_ || state_->ending) return;
  member.wanted = true;
  state_->activate(member);
  if (!member.met) ++connecting_;
  any_wanted_ = true;
}

void Mesh::make_links() {
  any_wanted_ = false;
  // Loops by index, because a listener that is told of a failure may ask for more links.
  for (size_t i = 0; i < active().size(); ++i) {
    Member& member = state_->members[active()[i]];
    if ((member.wanted || member.met) && !member.ready) advance(member);
  }
}

void Mesh::want_all() {
  for (uint32_t r = 0; r < ranks_; ++r) want(r);
}

void Mesh::want_first() {
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (first_[r]) want(r);
  }
}

void Mesh::advance(Member& member) {
  if (absl::Status status = step(member); !status.ok()) {
    listener_.on_wrong(status, rank_of(member));
  }
}

absl::Status Mesh::step(Member& member) {
  if (member.ready || state_->ending) return absl::OkStatus();
  Process& process = *member.process;
  if (process.goodbye) {
    member.bye = true;
    return absl::OkStatus();
  }
  if (!process.up) {
    endpoint_.want(process);
    return absl::OkStatus();
  }
  if (!process.ready()) return absl::OkStatus();
  if (!member.asked) {
    if (absl::Status status = join(member); !status.ok()) return status;
  }
  return member.met ? link_up(member) : absl::OkStatus();
}

absl::Status Mesh::join(Member& member) {
  const bool direct = member.process->direct();
  Join ours{.rank = rank_,
            .ranks = ranks_,
            .digest = state_->digest,
            .slot_bytes = options_word(options_),
            .control_offset = state_->control_memory.offset};
  absl::StatusOr<RemoteRegion> control = worker().remote_region(state_->control_memory.region);
  if (!control.ok()) return control.status();
  std::string tail = control->encode();
  if (direct) {
    absl::StatusOr<Block> outbox = memory().stage(sizeof(Outbox));
    if (!outbox.ok()) return outbox.status();
    reinterpret_cast<Outbox*>(outbox->data)->clear();
    member.our_outbox = *outbox;
    if (absl::Status status = publish_regions(); !status.ok()) return status;
    absl::StatusOr<RemoteRegion> region = worker().remote_region(outbox->region);
    if (!region.ok()) return region.status();
    ours.outbox_offset = outbox->offset;
    tail += region->encode();
  } else {
    uint64_t& first = member.process->first_link;
    if (first == 0) first = id_;
    absl::StatusOr<std::unique_ptr<TransferLink>> link = TransferLink::create(
        worker(), memory(), member.peer(), options_.slot_bytes, id_, ranks_, first != id_);
    if (!link.ok()) return link.status();
    member.transfer = link->get();
    member.link = *std::move(link);
    ++transfers_;
    tail += member.transfer->offer().encode();
  }
  endpoint_.tell(*member.process, id_, ControlMessage::kJoin,
                 std::string(reinterpret_cast<const char*>(&ours), sizeof ours) + tail);
  member.asked = true;
  return absl::OkStatus();
}

absl::Status Mesh::on_join(Member& member, std::string_view body) {
  Join theirs;
  constexpr size_t kRegion = RemoteRegion::kEncodedBytes;
  if (member.met) return absl::OkStatus();
  if (body.size() < sizeof theirs + kRegion) {
    return absl::InvalidArgumentError(absl::StrCat(member.label, " joined in another form"));
  }
  std::memcpy(&theirs, body.data(), sizeof theirs);
  body.remove_prefix(sizeof theirs);
  if (theirs.ranks != ranks_ || theirs.rank != rank_of(member) || theirs.digest != state_->digest) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ranks disagree about the group \"%s\": %s joined it as rank %u of %u, and rank %u has a "
        "list of %u handles that is not the same: all need the same handles in the same order, and "
        "no other group the same uuid",
        options_.name, member.label, theirs.rank, theirs.ranks, rank_, ranks_));
  }
  if (const uint64_t ours = options_word(options_); theirs.slot_bytes != ours) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %s; rank %u has %s: use the same options of the group on all ranks",
                        member.label, options_text(theirs.slot_bytes), rank_, options_text(ours)));
  }
  absl::StatusOr<RemoteRegion> control = RemoteRegion::decode(body.substr(0, kRegion));
  if (!control.ok()) return control.status();
  member.control = *control;
  member.control_offset = theirs.control_offset;
  body.remove_prefix(kRegion);
  if (body.size() == kRegion) {
    absl::StatusOr<RemoteRegion> outbox = RemoteRegion::decode(body);
    if (!outbox.ok()) return outbox.status();
    member.outbox = *outbox;
    member.outbox_offset = theirs.outbox_offset;
  } else {
    member.offer = std::string(body);
  }
  member.met = true;
  if (!member.wanted) ++connecting_;
  return step(member);
}

absl::Status Mesh::link_up(Member& member) {
  if (!member.offer.empty()) {
    absl::StatusOr<TransferLink::Offer> theirs = TransferLink::Offer::decode(member.offer);
    if (!theirs.ok()) return theirs.status();
    if (member.transfer == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(member.label, " has joined by another kind of link"));
    }
    member.transfer->set_offer(*theirs);
    made(member);
    return absl::OkStatus();
  }
  if (member.our_outbox.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(member.label, " has joined by another kind of link"));
  }
  const auto view_of = [&](const RemoteRegion& region, uint64_t offset,
                           size_t size) -> absl::StatusOr<RemoteView> {
    absl::StatusOr<RemoteView> view = worker().view(member.peer(), region);
    if (!view.ok()) return view;
    if (offset > view->size || size > view->size - offset) {
      return absl::OutOfRangeError(absl::StrCat(member.label, " named bytes outside its memory"));
    }
    view->data += offset;
    view->size = size;
    return view;
  };
  absl::StatusOr<RemoteView> control =
      view_of(member.control, member.control_offset, sizeof(ControlBlock));
  absl::StatusOr<RemoteView> outbox = control;
  if (control.ok()) outbox = view_of(member.outbox, member.outbox_offset, sizeof(Outbox));
  // Their file may still be on its way.
  if (absl::IsUnavailable(outbox.status())) return absl::OkStatus();
  if (!outbox.ok()) return outbox.status();
  member.view = *control;
  auto link = std::make_unique<executor::DirectLink>(executor::DirectLink::Ends{
      worker(), memory(), member.peer(), *reinterpret_cast<Outbox*>(member.our_outbox.data),
      member.process->view, *std::move(control), *std::move(outbox), options_.slot_bytes});
  member.direct = link.get();
  member.link = std::move(link);
  made(member);
  return absl::OkStatus();
}

void Mesh::made(Member& member) {
  member.ready = true;
  --connecting_;
  endpoint_.tell(*member.process, id_, ControlMessage::kLinked, "");
  count_linked(member);
  listener_.on_link(rank_of(member), *member.link);
}

// A group is ready once both ends of its first links are made: a rank that is ready may compute for
// a while, and others need its help to make their end.
void Mesh::count_linked(const Member& member) {
  if (first_[rank_of(member)] && member.ready && member.linked) --starting_;
}

}  // namespace baton::collectives::internal

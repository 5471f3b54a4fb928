// Sending and receiving: grants, writes and counters.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "plugins/nccl/net.h"

namespace baton::nccl {
namespace {

constexpr size_t kGroupBytes = kMostReceives * sizeof(Grant);
constexpr size_t kRingBytes = kGroups * kGroupBytes;
// So many calls find nothing before the worker is helped, or looked at for errors.
constexpr uint32_t kIdlePolls = 16;
constexpr Time kNoMatch = std::chrono::seconds(10);

absl::Status make_counters(Worker& worker, absl::Span<CounterId> counters) {
  for (CounterId& counter : counters) {
    const absl::StatusOr<CounterId> made = worker.allocate_counter();
    if (!made.ok()) return made.status();
    counter = *made;
  }
  return absl::OkStatus();
}

void free_counters(Worker& worker, absl::Span<const CounterId> counters) {
  for (const CounterId& counter : counters) {
    if (counter.generation != 0) worker.free_counter(counter).IgnoreError();
  }
}

}  // namespace

// --- the sender ----------------------------------------------------------------------------------

absl::Status SendComm::prepare() {
  for (uint32_t i = 0; i < kSends; ++i) {
    sends_[i].comm = this;
    free_[i] = static_cast<uint16_t>(kSends - 1 - i);
  }
  free_count_ = kSends;
  const absl::StatusOr<Block> block = hub.allocate(kRingBytes);
  if (!block.ok()) return block.status();
  ring_block = *block;
  const absl::StatusOr<MemoryRegion> again = hub.register_again(ring_block);
  if (!again.ok()) return again.status();
  ring = *again;
  absl::Status status = make_counters(hub.worker(), absl::MakeSpan(&ended, 1));
  if (status.ok()) status = make_counters(hub.worker(), absl::MakeSpan(posted));
  return status;
}

SendComm::~SendComm() {
  remove_all();
  if (ring.generation != 0) hub.worker().deregister_memory(ring).IgnoreError();
  free_counters(hub.worker(), posted);
  if (ring_block.data != nullptr) hub.free(ring_block);
}

void SendComm::revoke() {
  cancel(nullptr);
  if (ring.generation == 0) return;
  hub.worker().deregister_memory(ring).IgnoreError();  // no grant lands here any more
  ring.generation = 0;
}

void SendComm::cancel(const NetMemory* memory) {
  for (const Send& send : sends_) {
    if (send.state.load(std::memory_order_acquire) != kActive) continue;
    const TransferId id = send.id.load(std::memory_order_acquire);
    if (memory != nullptr && send.memory.load(std::memory_order_relaxed) != memory) continue;
    hub.worker().cancel(id).IgnoreError();
  }
}

bool SendComm::reads(const NetMemory* memory) const {
  return std::any_of(sends_.begin(), sends_.end(), [&](const Send& send) {
    if (send.state.load(std::memory_order_acquire) != kActive) return false;
    const TransferId id = send.id.load(std::memory_order_acquire);
    return send.memory.load(std::memory_order_relaxed) == memory &&
           !hub.worker().local_free(id).value_or(true);
  });
}

absl::StatusOr<bool> SendComm::find(int tag, uint64_t& group, int& slot) const {
  for (group = head_; group - head_ < kGroups && is_posted(group); ++group) {
    const Grant* const grants = this->grants(group);
    const int count = grants[0].count;
    if (count < 1 || count > kMostReceives || grants[0].group != static_cast<uint32_t>(group)) {
      return absl::InternalError(
          absl::StrFormat("a group of %d grants, number %u instead of %u: the receiver is damaged",
                          count, grants[0].group, static_cast<uint32_t>(group)));
    }
    for (slot = 0; slot < count; ++slot) {
      if (grants[slot].tag == tag && (taken_[group % kGroups] >> slot & 1) == 0) return true;
    }
  }
  return false;
}

absl::Status SendComm::send(const void* data, size_t size, int tag, const void* memory,
                            void** request) {
  if (!is_posted(head_)) {  // one load, and it is over
    if (++polls_ % kIdlePolls != 0) return absl::OkStatus();
    hub.poll();
    return broken() ? status() : absl::OkStatus();
  }
  if (broken()) {
    if (absl::Status why = status(); !why.ok()) return why;
  }
  if (size > kMostBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a message of %u bytes: the most is 1 TiB", size));
  }
  uint64_t group = 0;
  int slot = 0;
  const absl::StatusOr<bool> found = find(tag, group, slot);
  if (!found.ok()) {
    fail(found.status());
    return found.status();
  }
  if (!*found) {
    note_no_match(tag);
    return absl::OkStatus();
  }
  no_match_since_ = kNever;
  const Grant& grant = grants(group)[slot];
  // As NCCL's own networks have it: what the receiver has no room for is left out.
  const size_t bytes = std::min(size, static_cast<size_t>(grant.bytes));
  const absl::StatusOr<Place> from = place_of(memory, data, bytes);
  if (!from.ok()) return from.status();
  if (free_count_ == 0) return absl::OkStatus();
  const uint16_t index = free_[free_count_ - 1];
  Send& send = sends_[index];
  TransferRequest transfer{
      .peer = peer->id,
      .counter = {peer->uid, grant.counter, grant.counter_generation},
      .increment = bytes + 1,
      .polled = (grant.flags & Grant::kPolled) != 0,
      .on_end = &SendComm::on_end,
      .context = &send,
      .detached = true,
  };
  if (bytes != 0) {
    transfer.local = from->memory->region;
    transfer.local_layout = Layout::contiguous(from->offset, bytes);
    transfer.remote = {
        .owner = peer->uid,
        .key = grant.key,
        .size = grant.region_bytes,
        .index = grant.region,
        .generation = grant.generation,
        .access = Access::kRemoteWrite,
        .kind = grant.flags & Grant::kOfDevice ? MemoryKind::kDevice : MemoryKind::kHost,
        .direct = (grant.flags & Grant::kDirect) != 0};
    transfer.remote_layout = Layout::contiguous(grant.offset, bytes);
  }
  // Read now: once the receiver has the last message of a group it may write another one there.
  all_[group % kGroups] = static_cast<uint8_t>((1 << grants(group)[0].count) - 1);
  send.memory.store(from->memory, std::memory_order_relaxed);
  send.bytes = bytes;
  send.state.store(kActive, std::memory_order_relaxed);
  open.fetch_add(1, std::memory_order_relaxed);
  const absl::StatusOr<TransferId> id = hub.worker().submit(transfer);
  if (!id.ok()) {
    send.state.store(kFree, std::memory_order_relaxed);
    open.fetch_sub(1, std::memory_order_relaxed);
    if (absl::IsResourceExhausted(id.status())) return absl::OkStatus();  // NCCL asks again
    fail(id.status());
    return id.status();
  }
  send.id.store(*id, std::memory_order_release);
  --free_count_;
  taken_[group % kGroups] |= static_cast<uint8_t>(1 << slot);
  for (size_t at = head_ % kGroups; taken_[at] != 0 && taken_[at] == all_[at];) {
    taken_[at] = 0;
    at = ++head_ % kGroups;
  }
  *request = net_door::request_of(*this, index, send.generation);
  hub.poll();
  return absl::OkStatus();
}

void SendComm::on_end(void* context, TransferId /*id*/, const absl::Status& status) {
  auto& send = *static_cast<Send*>(context);
  SendComm& comm = *send.comm;
  if (!status.ok()) comm.fail(status);
  send.state.store(status.ok() ? kDone : kFailed, std::memory_order_release);
  comm.open.fetch_sub(1, std::memory_order_release);  // the comm may go now
}

absl::StatusOr<bool> SendComm::test(uint32_t index, uint16_t generation, int* sizes) {
  Send* const send = index < kSends ? &sends_[index] : nullptr;
  if (send == nullptr || send->generation != generation ||
      send->state.load(std::memory_order_relaxed) == kFree) {
    return absl::InvalidArgumentError("not a request of this comm, or it is done");
  }
  State state = send->state.load(std::memory_order_acquire);
  if (state == kActive) {
    hub.poll();
    state = send->state.load(std::memory_order_acquire);
  }
  if (state == kActive) {
    if (++polls_ % kIdlePolls == 0 && broken()) {
      if (absl::Status why = status(); !why.ok()) return why;
    }
    return false;
  }
  if (state == kFailed) return status();
  if (sizes != nullptr) sizes[0] = static_cast<int>(send->bytes);
  ++send->generation;
  send->state.store(kFree, std::memory_order_relaxed);
  free_[free_count_++] = static_cast<uint16_t>(index);
  return true;
}

void SendComm::note_no_match(int tag) {
  if (++polls_ % kIdlePolls != 0) return;
  hub.poll();
  const Time now = hub.worker().clock().now();
  if (no_match_since_ == kNever) no_match_since_ = now;
  if (now - no_match_since_ < kNoMatch || said.exchange(true)) return;
  std::vector<int> tags;
  for (uint64_t group = head_; group - head_ < kGroups && is_posted(group); ++group) {
    const int count = std::min<int>(grants(group)[0].count, kMostReceives);  // the peer may write
    for (int slot = 0; slot < count; ++slot) tags.push_back(grants(group)[slot].tag);
  }
  Plugin::get().say(
      LogLevel::kWarn,
      absl::StrFormat("isend waits for a receive with tag %d for 10 s; posted are those with tags "
                      "%s: both ranks must call the same operations in the same order",
                      tag, absl::StrJoin(tags, ", ")));
}

// --- the receiver --------------------------------------------------------------------------------

absl::Status ReceiveComm::prepare() {
  const absl::StatusOr<Block> block = hub.allocate(kRingBytes);
  if (!block.ok()) return block.status();
  records_ = *block;
  return make_counters(hub.worker(), absl::MakeSpan(&ended, 1));
}

ReceiveComm::~ReceiveComm() {
  for (const Group& group : groups_) free_counters(hub.worker(), group.arrived);
  if (records_.data != nullptr) hub.free(records_);
}

absl::Status ReceiveComm::receive(int count, void** data, const size_t* sizes, const int* tags,
                                  void** memory, bool polled, void** request) {
  if (count < 1 || count > kMostReceives) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d receives in a group: 1 to %d are possible (maxRecvs)", count, kMostReceives));
  }
  const auto place = static_cast<uint32_t>(next_ % kGroups);
  Group& group = groups_[place];
  if (group.active) return absl::OkStatus();
  if (broken()) {
    if (absl::Status why = status(); !why.ok()) return why;
  }
  Worker& worker = hub.worker();
  const size_t at = place * kGroupBytes;
  auto* const grants = reinterpret_cast<Grant*>(records_.data + at);
  for (int i = 0; i < count; ++i) {
    if (sizes[i] > kMostBytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a receive of %u bytes: the most is 1 TiB", sizes[i]));
    }
    const absl::StatusOr<Place> to = place_of(memory[i], data[i], sizes[i]);
    if (!to.ok()) return to.status();
    if (group.arrived[i].generation == 0) {
      if (absl::Status made = make_counters(worker, absl::MakeSpan(&group.arrived[i], 1));
          !made.ok()) {
        return made;
      }
      group.before[i] = 0;
    }
    const RemoteCounter counter = worker.remote_counter(group.arrived[i]);
    Grant& grant = grants[i];
    grant = {.offset = to->offset,
             .bytes = sizes[i],
             .counter = counter.index,
             .counter_generation = counter.generation,
             .count = static_cast<uint8_t>(count),
             .flags = static_cast<uint8_t>(polled ? Grant::kPolled : 0),
             .tag = tags[i],
             .group = static_cast<uint32_t>(next_)};
    if (sizes[i] == 0) continue;
    const RemoteRegion& remote = to->memory->remote;
    grant.key = remote.key;
    grant.region_bytes = remote.size;
    grant.region = remote.index;
    grant.generation = remote.generation;
    if (remote.kind == MemoryKind::kDevice) grant.flags |= Grant::kOfDevice;
    if (remote.direct) grant.flags |= Grant::kDirect;
  }
  const size_t bytes = static_cast<size_t>(count) * sizeof(Grant);
  open.fetch_add(1, std::memory_order_relaxed);
  const absl::StatusOr<TransferId> id =
      worker.submit({.peer = peer->id,
                     .local = records_.region,
                     .local_layout = Layout::contiguous(records_.offset + at, bytes),
                     .remote = their_ring,
                     .remote_layout = Layout::contiguous(ring_offset + at, bytes),
                     .counter = their_posted[place],
                     .on_end = &ReceiveComm::on_end,
                     .context = this,
                     .detached = true});
  if (!id.ok()) {
    open.fetch_sub(1, std::memory_order_relaxed);
    if (absl::IsResourceExhausted(id.status())) return absl::OkStatus();  // NCCL asks again
    fail(id.status());
    return id.status();
  }
  group.active = true;
  group.count = count;
  ++next_;
  *request = net_door::request_of(*this, place, group.generation);
  hub.poll();
  return absl::OkStatus();
}

void ReceiveComm::on_end(void* context, TransferId /*id*/, const absl::Status& status) {
  auto& comm = *static_cast<ReceiveComm*>(context);
  if (!status.ok()) comm.fail(status);
  comm.open.fetch_sub(1, std::memory_order_release);  // the comm may go now
}

absl::StatusOr<bool> ReceiveComm::test(uint32_t index, uint16_t generation, int* sizes) {
  Group* const group = index < kGroups ? &groups_[index] : nullptr;
  if (group == nullptr || !group->active || group->generation != generation) {
    return absl::InvalidArgumentError("not a request of this comm, or it is done");
  }
  Worker& worker = hub.worker();
  std::array<uint64_t, kMostReceives> now;
  const auto all_there = [&] {
    for (int i = 0; i < group->count; ++i) {
      now[i] = worker.counter_value(group->arrived[i]);
      if (now[i] == group->before[i]) return false;
    }
    return true;
  };
  if (!all_there()) {
    // Data that arrived counts, also if the sender has closed since.
    const bool over = broken();
    hub.poll();
    if (!all_there()) {
      if (over) {
        if (absl::Status why = status(); !why.ok()) return why;
      }
      return false;
    }
  }
  for (int i = 0; i < group->count; ++i) {
    const uint64_t bytes = ((now[i] - group->before[i]) & CounterTable::kMaxValue) - 1;
    if (sizes != nullptr) sizes[i] = static_cast<int>(bytes);
    group->before[i] = now[i];
  }
  group->active = false;
  ++group->generation;
  return true;
}

}  // namespace baton::nccl

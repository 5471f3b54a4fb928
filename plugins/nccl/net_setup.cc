// Listening, connecting and accepting. Nothing here waits: NCCL calls until there is a comm.
//
// The sender calls the hub behind the handle, and when that answers sends it an Open. The listener
// keeps the Open until NCCL accepts it and answers Accepted; a hub without that listener answers
// Refused.
#include <deque>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plugins/nccl/net.h"
#include "plugins/nccl/net_messages.h"
#include "transport/base/worker_keys.h"

namespace baton::nccl {
namespace {

constexpr std::array<char, 4> kHandleMagic = {'B', 'n', 'c', 'l'};

// The 128 bytes that NCCL hands to the other rank.
struct ListenHandle {
  std::array<char, Handle::kBytes> process;
  std::array<char, 4> magic;
  uint32_t version;
  uint64_t listener;  // random
  // The number of the connect, in the copy of the handle that connect() gets. 0: none yet.
  uint64_t connecting;
  uint64_t unused;
};
static_assert(sizeof(ListenHandle) == kHandleBytes);

uint64_t random_number() {
  uint64_t number = 0;
  do {
    base::fill_with_secret(&number, sizeof number);
  } while (number == 0);
  return number;
}

struct Incoming {
  HubPeer* from;
  Open open;
};

struct Listener {
  Hub* hub = nullptr;
  std::deque<Incoming> incoming;
};

// All listeners and unfinished connects, of all hubs. Numbers are random. NCCL's handle of a
// listener is its number, so that using a closed listener is an error and not a crash.
struct NetDoor {
  std::mutex mutex;
  std::map<uint64_t, std::unique_ptr<Listener>> listeners;
  std::map<uint64_t, std::unique_ptr<SendComm>> connecting;
};
NetDoor& door() {
  static auto* const all = new NetDoor;
  return *all;
}

// Call with the lock held. Null if there is no such listener.
Listener* find(void* listener) {
  const auto found = door().listeners.find(reinterpret_cast<uintptr_t>(listener));
  return found == door().listeners.end() ? nullptr : found->second.get();
}
absl::Status no_listener() {
  return absl::InvalidArgumentError("not a comm that listen() gave, or it is closed");
}

absl::Status tell(Hub& hub, const HubPeer& peer, const NetMessage& message) {
  std::string text;
  base::write_fields(message, text);
  return hub.tell(peer, Door::kNet, text);
}

void refuse(Hub& hub, const HubPeer& peer, uint64_t sender, std::string why) {
  tell(hub, peer, {.kind = NetMessage::Kind::kRefused, .refused = {sender, std::move(why)}})
      .IgnoreError();  // a peer that is gone needs no answer
}

void on_message(Hub& hub, HubPeer& from, std::string_view text) {
  const absl::StatusOr<NetMessage> read =
      base::read_fields<NetMessage>(text, "a message of NCCL's net");
  if (!read.ok()) {
    fail("a peer sent what no build of this version sends", read.status());
    return;
  }
  const std::lock_guard lock(door().mutex);
  if (read->kind == NetMessage::Kind::kOpen) {
    const auto found = door().listeners.find(read->open.listener);
    if (read->open.version != kNetVersion) {
      return refuse(hub, from, read->open.sender, "it is of another build of libnccl-net-baton.so");
    }
    if (found == door().listeners.end() || found->second->hub != &hub) {
      return refuse(hub, from, read->open.sender, "nothing listens there any more");
    }
    found->second->incoming.push_back({&from, read->open});
    return;
  }
  const bool accepted = read->kind == NetMessage::Kind::kAccepted;
  const auto found =
      door().connecting.find(accepted ? read->accepted.sender : read->refused.sender);
  if (found == door().connecting.end() || found->second->peer != &from) return;
  if (accepted) {
    found->second->their_end = read->accepted.ended;
    found->second->accepted.store(true);
  } else {
    found->second->refused = read->refused.why;
  }
}

absl::StatusOr<ListenHandle> read_handle(const void* bytes) {
  ListenHandle handle;
  std::memcpy(&handle, bytes, sizeof handle);
  const absl::StatusOr<Handle> process =
      Handle::decode({handle.process.data(), handle.process.size()});
  if (!process.ok()) return process.status();
  if (handle.magic != kHandleMagic) {
    return absl::InvalidArgumentError("it is no handle that listen() of this plugin made");
  }
  if (handle.version != kNetVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s has version %u of the plugin, this process has %u: install the same Baton everywhere",
        process->label(), handle.version, kNetVersion));
  }
  return handle;
}

absl::Status no_number() {
  return absl::ResourceExhaustedError("this process has 65,535 comms: close some");
}

// The first call of connect().
absl::StatusOr<std::unique_ptr<SendComm>> begin(int device, const ListenHandle& handle) {
  absl::StatusOr<Hub*> hub = Plugin::get().hub(device);
  if (!hub.ok()) return hub.status();
  const Handle process = *Handle::decode({handle.process.data(), handle.process.size()});
  if (process.uid() == (*hub)->handle().uid()) {
    hub = Plugin::get().calling_hub(device);
    if (!hub.ok()) return hub.status();
  }
  const absl::StatusOr<HubPeer*> peer = (*hub)->call(process);
  if (!peer.ok()) return peer.status();
  auto comm = std::make_unique<SendComm>(**hub, *peer);
  if (absl::Status status = comm->prepare(); !status.ok()) return status;
  comm->key = random_number();
  std::memcpy(comm->handle.data(), &handle, offsetof(ListenHandle, connecting));
  return comm;
}

absl::Status ask(SendComm& comm) {
  ListenHandle handle;
  std::memcpy(&handle, comm.handle.data(), sizeof handle);
  Worker& worker = comm.hub.worker();
  NetMessage message{.kind = NetMessage::Kind::kOpen};
  Open& open = message.open;
  open.listener = handle.listener;
  open.sender = comm.key;
  const absl::StatusOr<RemoteRegion> ring = worker.remote_region(comm.ring);
  if (!ring.ok()) return ring.status();
  open.ring = *ring;
  open.ring_offset = comm.ring_block.offset;
  for (uint32_t i = 0; i < kGroups; ++i) open.posted[i] = worker.remote_counter(comm.posted[i]);
  open.ended = worker.remote_counter(comm.ended);
  return tell(comm.hub, *comm.peer, message);
}

// Continues a connect that has begun; true when it is done.
absl::StatusOr<bool> advance(SendComm& comm) {
  comm.hub.listen();
  if (absl::Status status = comm.hub.status(*comm.peer); !status.ok()) return status;
  if (!comm.asked) {
    if (!comm.peer->up) return false;
    const absl::Status asked = ask(comm);
    if (absl::IsResourceExhausted(asked)) return false;
    if (!asked.ok()) return asked;
    comm.asked = true;
    return false;
  }
  const std::lock_guard lock(door().mutex);
  if (!comm.refused.empty()) return absl::UnavailableError("the peer refused: " + comm.refused);
  return comm.accepted.load();
}

}  // namespace

void net_door::open_door(Hub& hub) {
  hub.on_message(Door::kNet,
                 [&hub](HubPeer& from, std::string_view text) { on_message(hub, from, text); });
}

void net_door::close_door(Hub& hub) {
  const std::lock_guard lock(door().mutex);
  std::erase_if(door().listeners, [&](const auto& entry) { return entry.second->hub == &hub; });
  std::erase_if(door().connecting, [&](const auto& entry) { return &entry.second->hub == &hub; });
}

Result net_door::listen(int device, void* handle, void** listener) {
  if (handle == nullptr || listener == nullptr) {
    return fail("listen", absl::InvalidArgumentError("no place for the handle or the comm"));
  }
  *listener = nullptr;
  const absl::StatusOr<Hub*> hub = Plugin::get().hub(device);
  if (!hub.ok()) return fail("listen", hub.status());
  ListenHandle out{};
  const std::string process = (*hub)->handle().bytes();
  std::copy(process.begin(), process.end(), out.process.begin());
  out.magic = kHandleMagic;
  out.version = kNetVersion;
  out.listener = random_number();
  auto made = std::make_unique<Listener>();
  made->hub = *hub;
  *listener = reinterpret_cast<void*>(uintptr_t{out.listener});
  const std::lock_guard lock(door().mutex);
  door().listeners[out.listener] = std::move(made);
  std::memcpy(handle, &out, sizeof out);
  return Result::kSuccess;
}

Result net_door::connect(int device, void* handle, void** comm) {
  if (handle == nullptr || comm == nullptr) {
    return fail("connect", absl::InvalidArgumentError("no handle, or no place for the comm"));
  }
  *comm = nullptr;
  absl::StatusOr<ListenHandle> read = read_handle(handle);
  if (!read.ok()) return fail("connect", read.status());
  const absl::StatusOr<Hub*> hub = Plugin::get().hub(device);
  if (!hub.ok()) return fail("connect", hub.status());
  if (read->connecting == 0) {
    absl::StatusOr<std::unique_ptr<SendComm>> begun = begin(device, *read);
    if (!begun.ok()) return fail("connect", begun.status());
    // NCCL gives the same buffer until there is a comm: what is known is behind this.
    static_cast<ListenHandle*>(handle)->connecting = read->connecting = (*begun)->key;
    const std::lock_guard lock(door().mutex);
    door().connecting[read->connecting] = *std::move(begun);
  }
  SendComm* found = nullptr;
  {
    const std::lock_guard lock(door().mutex);
    const auto at = door().connecting.find(read->connecting);
    if (at != door().connecting.end()) found = at->second.get();
  }
  if (found == nullptr ||
      std::memcmp(found->handle.data(), handle, offsetof(ListenHandle, connecting)) != 0) {
    return fail("connect", absl::InvalidArgumentError(
                               "the handle's buffer has been changed between two calls"));
  }
  (*hub)->listen();  // of a call to this process itself, the side that answers
  const absl::StatusOr<bool> done = advance(*found);
  if (done.ok() && !*done) return Result::kSuccess;
  static_cast<ListenHandle*>(handle)->connecting = 0;
  std::unique_ptr<SendComm> made;
  {
    const std::lock_guard lock(door().mutex);
    const auto at = door().connecting.find(found->key);
    made = std::move(at->second);
    door().connecting.erase(at);
  }
  if (!done.ok()) return fail("connect", done.status());
  if (!enlist(*made)) return fail("connect", no_number());
  *comm = handle_of(*made.release());
  return Result::kSuccess;
}

Result net_door::accept(void* listener, void** comm) {
  if (comm == nullptr) return fail("accept", no_listener());
  *comm = nullptr;
  if (absl::Status ours = Plugin::get().of_this_process(); !ours.ok()) return fail("accept", ours);
  Hub* of = nullptr;
  {
    const std::lock_guard lock(door().mutex);
    if (const Listener* const from = find(listener); from != nullptr) of = from->hub;
  }
  if (of == nullptr) return fail("accept", no_listener());
  Hub& hub = *of;
  hub.listen();
  Incoming incoming;
  {
    const std::lock_guard lock(door().mutex);
    Listener* const from = find(listener);
    // Drops connects whose callers are gone: NCCL waits for another one.
    while (from != nullptr && !from->incoming.empty() && from->incoming.front().from->down) {
      from->incoming.pop_front();
    }
    if (from == nullptr || from->incoming.empty()) return Result::kSuccess;
    incoming = std::move(from->incoming.front());
    from->incoming.pop_front();
  }
  auto made = std::make_unique<ReceiveComm>(hub, incoming.from);
  made->their_ring = incoming.open.ring;
  made->ring_offset = incoming.open.ring_offset;
  made->their_posted = incoming.open.posted;
  made->their_end = incoming.open.ended;
  absl::Status status = enlist(*made) ? made->prepare() : no_number();
  if (status.ok()) {
    const NetMessage message{
        .kind = NetMessage::Kind::kAccepted,
        .accepted = {incoming.open.sender, hub.worker().remote_counter(made->ended)}};
    status = tell(hub, *incoming.from, message);
  }
  if (!status.ok()) {
    refuse(hub, *incoming.from, incoming.open.sender, "it could not make its side");
    return fail("accept", status);
  }
  *comm = handle_of(*made.release());
  return Result::kSuccess;
}

Result net_door::close_listen(void* listener) {
  if (absl::Status ours = Plugin::get().of_this_process(); !ours.ok()) {
    return fail("closeListen", ours);
  }
  std::unique_ptr<Listener> gone;
  {
    const std::lock_guard lock(door().mutex);
    const auto at = door().listeners.find(reinterpret_cast<uintptr_t>(listener));
    if (at == door().listeners.end()) return fail("closeListen", no_listener());
    gone = std::move(at->second);
    door().listeners.erase(at);
  }
  for (const Incoming& incoming : gone->incoming) {
    refuse(*gone->hub, *incoming.from, incoming.open.sender, "it was closed before it accepted");
  }
  return Result::kSuccess;
}

}  // namespace baton::nccl

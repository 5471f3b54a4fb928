// A provider of your own: moves bytes between workers of one process. The guide to it is
// docs/write-a-provider.md; use_loopback.cc is a program that uses it, and tests/conformance runs
// over it. The side that owns the remote memory copies, in its own progress(): its region table
// needs no other lock, and a region that it takes back is fenced by that alone.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "transport/provider.h"

using namespace baton;

namespace {

struct Inbox;

// What one provider tells another. A real one writes this on a wire and checks it on arrival.
struct Message {
  enum class Kind : uint8_t { kConnect, kUp, kRefused, kSlice, kDone, kClosed };
  Kind kind = Kind::kClosed;
  uint64_t rail = 0;  // the receiver's
  uint64_t from = 0;  // the sender's
  uint64_t session = 0;
  HelloInfo who;
  std::array<uint8_t, 32> proof{};  // that the sender holds the cluster's key
  std::shared_ptr<Inbox> sender;
  Slice slice;          // lives until its slice_done()
  TransferId transfer;  // of a kDone
  uint32_t index = 0;
  absl::Status status;
};

// Where a provider hears from others. Its mutex is also held while a slice out of it is copied:
// whoever holds it knows that a slice is either still here or moves no byte any more.
struct Inbox {
  ~Inbox() { ::close(event_fd); }
  void put(Message message) {
    const std::lock_guard lock(mutex);
    messages.push_back(std::move(message));
    eventfd_write(event_fd, 1);
  }
  std::mutex mutex;
  std::vector<Message> messages;  // few: it keeps its capacity, and a slice allocates nothing
  const int event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
};

// Every provider of this process, by address. An address is never used again.
struct Everybody {
  std::mutex mutex;
  uint64_t last = 0;
  std::map<std::string, std::weak_ptr<Inbox>, std::less<>> inboxes;
} everybody;

class LoopbackProvider;

class LoopbackRail final : public Rail {
 public:
  LoopbackRail(LoopbackProvider& provider, uint64_t id, uint64_t peer_rail, const HelloInfo& peer,
               std::shared_ptr<Inbox> to);
  ~LoopbackRail() override;
  const Properties& properties() const override { return properties_; }
  absl::Status reaches(const RemoteRegion& remote) const override {
    if (remote.owner == peer_.uid) return absl::OkStatus();
    return absl::InvalidArgumentError("the remote region belongs to another worker");
  }
  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  void close(absl::Status why, EventSink& sink) override;

  void done(const Message& message, EventSink& sink);
  void tell(Message message) const;
  void end(const absl::Status& why, EventSink& sink);
  bool up() const { return up_; }

 private:
  bool withdraw(const Slice& slice);  // true: the peer has not seen it and never will

  LoopbackProvider& provider_;
  const uint64_t id_, peer_rail_;
  const HelloInfo peer_;
  const std::shared_ptr<Inbox> to_;
  Properties properties_;
  std::vector<Slice> open_;  // posted and not reported
  bool up_ = true;
};

class LoopbackProvider final : public Provider {
 public:
  explicit LoopbackProvider(const ProviderContext& context) : context_(context) {
    const std::lock_guard lock(everybody.mutex);
    address_ = std::to_string(++everybody.last);
    everybody.inboxes[address_] = inbox_;
  }
  ~LoopbackProvider() override {
    const std::lock_guard lock(everybody.mutex);
    everybody.inboxes.erase(address_);
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return address_; }
  // Peers that lose us call there.
  void set_worker_address(const std::string& encoded) override { self_.address = encoded; }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override {
    if (host_id != context_.host_id) return absl::UnavailableError("another machine");
    if (find(address) == nullptr) return absl::UnavailableError("another process");
    return absl::OkStatus();
  }
  void connect(const ConnectRequest& request) override;
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  absl::Status remove_region(const RegionEntry&, EventSink&) override { return absl::OkStatus(); }
  bool progress(EventSink& sink) override;
  int wait_fd() const override { return inbox_->event_fd; }
  bool arm() override {  // after this the descriptor is readable only if something came since
    const std::lock_guard lock(inbox_->mutex);
    eventfd_t ignored;
    (void)eventfd_read(inbox_->event_fd, &ignored);
    return inbox_->messages.empty() && failed_.empty();
  }

 private:
  friend class LoopbackRail;
  static std::shared_ptr<Inbox> find(std::string_view address) {
    const std::lock_guard lock(everybody.mutex);
    const auto it = everybody.inboxes.find(address);
    return it == everybody.inboxes.end() ? nullptr : it->second.lock();
  }
  void handle(Message& message, EventSink& sink);
  absl::Status copy(const Slice& slice);

  const ProviderContext context_;
  HelloInfo self_ = context_.self;
  const Capabilities capabilities_{
      .name = "loopback", .rank = 350, .available = true, .detail = "workers of this process"};
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  std::string address_;
  std::map<uint64_t, LoopbackRail*> rails_;
  std::vector<uint64_t> failed_;  // sessions whose peer was gone
  uint64_t last_rail_ = 0;
  std::string notify_;  // of the slice that is being told; it keeps its capacity
};

// --- a rail: the initiator's side of slices
// -------------------------------------------------------

LoopbackRail::LoopbackRail(LoopbackProvider& provider, uint64_t id, uint64_t peer_rail,
                           const HelloInfo& peer, std::shared_ptr<Inbox> to)
    : provider_(provider), id_(id), peer_rail_(peer_rail), peer_(peer), to_(std::move(to)) {
  properties_ = {.provider = "loopback",
                 .route = "loopback to \"" + peer.name + "\"",
                 .slice_bytes = 1 << 20,  // what others wait for while it is copied
                 .depth = 16};
  open_.reserve(properties_.depth);
  provider_.rails_[id_] = this;
}

LoopbackRail::~LoopbackRail() { provider_.rails_.erase(id_); }

void LoopbackRail::tell(Message message) const {
  message.rail = peer_rail_;
  message.from = id_;
  to_->put(std::move(message));
}

bool LoopbackRail::post(const Slice& slice, EventSink& sink) {
  if (!up_) {
    sink.slice_done(*this, slice.transfer->id, slice.index, absl::UnavailableError("rail is down"));
    return true;
  }
  if (open_.size() == properties_.depth) return false;
  open_.push_back(slice);
  tell({.kind = Message::Kind::kSlice, .slice = slice});
  return true;
}

bool LoopbackRail::withdraw(const Slice& slice) {
  const std::lock_guard lock(to_->mutex);
  return std::erase_if(to_->messages, [&](const Message& message) {
           return message.kind == Message::Kind::kSlice && message.from == id_ &&
                  message.rail == peer_rail_ && message.slice.transfer == slice.transfer &&
                  message.slice.index == slice.index;
         }) != 0;
}

// What the peer has begun ends by itself, soon: a slice is small.
void LoopbackRail::abort(TransferId transfer, EventSink& sink) {
  for (size_t i = open_.size(); i-- > 0;) {
    const Slice slice = open_[i];
    if (!(slice.transfer->id == transfer) || !withdraw(slice)) continue;
    open_.erase(open_.begin() + static_cast<ptrdiff_t>(i));
    sink.slice_done(*this, transfer, slice.index, absl::CancelledError("cancelled"));
  }
}

void LoopbackRail::done(const Message& message, EventSink& sink) {
  const auto it = std::find_if(open_.begin(), open_.end(), [&](const Slice& slice) {
    return slice.transfer->id == message.transfer && slice.index == message.index;
  });
  if (it == open_.end()) return;
  open_.erase(it);
  sink.slice_done(*this, message.transfer, message.index, message.status);
}

void LoopbackRail::end(const absl::Status& why, EventSink& sink) {
  if (!up_) return;
  up_ = false;
  const std::vector<Slice> open = std::move(open_);
  open_.clear();
  for (const Slice& slice : open) {
    // What the peer has taken may have landed, and must not be sent again before it was asked. When
    // withdraw() returns, no byte of the slice moves any more.
    const bool gone = !withdraw(slice) && slice.transfer->op == Op::kWrite;
    sink.slice_done(
        *this, slice.transfer->id, slice.index,
        gone ? absl::UnknownError(why.message()) : absl::UnavailableError(why.message()));
  }
  sink.rail_down(*this, why);
}

void LoopbackRail::close(absl::Status why, EventSink& sink) {
  // Who loses a connection calls again; who closes one for good says so.
  const bool lost = absl::IsUnavailable(why);
  const std::string text = "the peer closed the connection: " + std::string(why.message());
  if (up_) {
    tell({.kind = Message::Kind::kClosed,
          .status = lost ? absl::UnavailableError(text) : absl::AbortedError(text)});
  }
  end(why, sink);
}

// --- the provider: connections, and the target's side of slices
// -----------------------------------

void LoopbackProvider::connect(const ConnectRequest& request) {
  const std::shared_ptr<Inbox> to = find(request.address);
  if (to == nullptr) {
    failed_.push_back(request.session);
    return;
  }
  Message hello{.kind = Message::Kind::kConnect, .from = ++last_rail_, .session = request.session};
  hello.who = self_;
  hello.who.session = request.session;
  hello.who.resume = request.resume;
  hello.who.link = link_number();  // one name for the rail at both ends
  hello.proof = context_.key.hmac(request.address);
  hello.sender = inbox_;
  to->put(std::move(hello));
}

bool LoopbackProvider::progress(EventSink& sink) {
  bool any = !failed_.empty();
  for (uint64_t session : std::exchange(failed_, {})) {
    sink.connect_failed(session, absl::NotFoundError("the worker is gone"));
  }
  for (int round = 0; round < 32; ++round) {  // a bounded amount of work
    Message message;
    absl::Status copied;
    Arrival arrival;
    notify_.clear();
    {
      const std::lock_guard lock(inbox_->mutex);
      if (inbox_->messages.empty()) return any;
      message = std::move(inbox_->messages.front());
      inbox_->messages.erase(inbox_->messages.begin());
      if (message.kind == Message::Kind::kSlice) {
        // All that is read of the slice is read here: later the initiator may have withdrawn it.
        const Slice& slice = message.slice;
        const TransferDescriptor& transfer = *slice.transfer;
        const auto rail = rails_.find(message.rail);
        const bool known = rail != rails_.end() && rail->second->up();
        copied = known ? copy(slice) : absl::UnavailableError("the rail is gone");
        message.transfer = transfer.id;
        message.index = slice.index;
        if (transfer.op == Op::kWrite && slice.end == transfer.bytes) notify_ = transfer.notify;
        arrival = {.transfer = transfer.id,
                   .slice = slice.index,
                   .slice_bytes = slice.end - slice.begin,
                   .total_bytes = transfer.bytes,
                   .counter_index = transfer.counter.index,
                   .counter_generation = transfer.counter.generation,
                   .increment = transfer.increment};
        message.status = copied;
        if (transfer.op == Op::kRead) arrival.transfer = {};
      }
    }
    any = true;
    if (message.kind == Message::Kind::kSlice && copied.ok() && arrival.transfer.generation != 0) {
      arrival.notify = notify_;
      sink.arrived(*rails_.at(message.rail), arrival);
    }
    handle(message, sink);
  }
  return true;
}

// Every piece is checked (key, generation, bounds, rights) before a byte of it moves.
absl::Status LoopbackProvider::copy(const Slice& slice) {
  const TransferDescriptor& transfer = *slice.transfer;
  const bool write = transfer.op == Op::kWrite;
  TransferCursor cursor(transfer.local, transfer.remote_layout, slice.begin, slice.end);
  for (Piece piece; cursor.next(piece);) {
    const auto here = context_.regions.resolve(
        transfer.remote.index, transfer.remote.generation, transfer.remote.key,
        write ? Access::kRemoteWrite : Access::kRemoteRead, piece.remote_offset, piece.bytes);
    if (!here.ok()) return here.status();
    std::byte* there = transfer.local_base + piece.local_offset;
    std::memcpy(write ? *here : there, write ? there : *here, piece.bytes);
  }
  return absl::OkStatus();
}

void LoopbackProvider::handle(Message& message, EventSink& sink) {
  const auto found = rails_.find(message.rail);
  LoopbackRail* rail = found == rails_.end() ? nullptr : found->second;
  switch (message.kind) {
    case Message::Kind::kConnect: {
      Message answer{.kind = Message::Kind::kUp, .rail = message.from, .session = message.session};
      if (message.proof != context_.key.hmac(address_)) {
        answer.kind = Message::Kind::kRefused;
        answer.status = absl::PermissionDeniedError("the cluster keys differ");
        sink.handshake_refused(message.who.name, answer.status);
        message.sender->put(std::move(answer));
        return;
      }
      answer.from = ++last_rail_;
      answer.who = self_;
      answer.who.link = message.who.link;
      answer.sender = inbox_;
      auto made = std::make_unique<LoopbackRail>(*this, answer.from, message.from, message.who,
                                                 message.sender);
      message.sender->put(std::move(answer));
      sink.accepted(message.who, std::move(made));
      return;
    }
    case Message::Kind::kUp:
      sink.connected(message.session, message.who,
                     std::make_unique<LoopbackRail>(*this, message.rail, message.from, message.who,
                                                    message.sender));
      return;
    case Message::Kind::kRefused:
      sink.connect_failed(message.session, message.status);
      return;
    case Message::Kind::kSlice:
      if (rail != nullptr) {
        rail->tell({.kind = Message::Kind::kDone,
                    .transfer = message.transfer,
                    .index = message.index,
                    .status = message.status});
      }
      return;
    case Message::Kind::kDone:
      if (rail != nullptr) rail->done(message, sink);
      return;
    case Message::Kind::kClosed:
      if (rail != nullptr) rail->end(message.status, sink);
      return;
  }
}

std::unique_ptr<Provider> make_loopback(const ProviderContext& context) {
  return std::make_unique<LoopbackProvider>(context);
}

}  // namespace

// Whoever links this file has it, by name.
extern "C" const ProviderRegistration baton_provider_loopback("loopback", make_loopback);

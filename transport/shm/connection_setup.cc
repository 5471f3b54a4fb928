// How a connection comes up: dialing, authentication, the exchange of files; and its messages.
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "transport/base/copies/copy_kernel.h"
#include "transport/shm/connection.h"

namespace baton::shm {
namespace {

constexpr Time kSetupTimeout = std::chrono::seconds(5);
constexpr Time kRedial = std::chrono::milliseconds(5);

HelloInfo hello(const Shared& shared, const ConnectRequest& request) {
  HelloInfo self = shared.context.self;
  self.session = request.session;
  self.resume = request.resume;
  self.link = link_number();
  self.rail = 0;
  self.rails = 1;
  return self;
}

}  // namespace

Connection::Connection(Shared& shared, ConnectRequest request)
    : shared_(shared),
      client_(true),
      request_(std::move(request)),
      state_(State::kDialing),
      deadline_(shared.context.clock.now() + kSetupTimeout),
      handshake_(std::in_place, net::Handshake::Role::kClient, shared.context.key,
                 hello(shared, request_)) {
  link_ = handshake_->self().link;
  heat();
}

Connection::Connection(Shared& shared, PacketSocket socket)
    : shared_(shared),
      client_(false),
      state_(State::kHandshake),
      deadline_(shared.context.clock.now() + kSetupTimeout),
      socket_(std::move(socket)),
      handshake_(std::in_place, net::Handshake::Role::kServer, shared.context.key,
                 hello(shared, {})) {
  heat();
  // The caller hears at once that its socket is closed.
  if (!watch(false).ok()) abandon();
}

// The low bit of the epoll data tells the process from the socket.
absl::Status Connection::watch(bool for_writing) {
  if (watched_ && for_writing == watching_writes_) return absl::OkStatus();
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP | (for_writing ? EPOLLOUT : 0U),
                    .data = {.u64 = reinterpret_cast<uint64_t>(this)}};
  const int how = watched_ ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (epoll_ctl(shared_.epoll.get(), how, socket_.fd(), &event) != 0) {
    return absl::UnavailableError(
        absl::StrFormat("a socket of shm cannot be watched: %s", strerror(errno)));
  }
  watched_ = true;
  watching_writes_ = for_writing;
  return absl::OkStatus();
}

bool Connection::on_time(Time now, EventSink& sink) {
  if (state_ == State::kUp || state_ == State::kDown) return false;
  if (now >= deadline_) {
    fail(absl::UnavailableError("the peer did not answer for 5 s: is its process stopped, or does "
                                "it not call progress()?"),
         sink);
    return true;
  }
  if (state_ != State::kDialing || now < dial_at_) return false;
  absl::Status status = dial();
  if (absl::IsResourceExhausted(status)) {
    dial_at_ = now + kRedial;
    return false;
  }
  if (!status.ok()) fail(status, sink);
  return true;
}

Time Connection::next_timer() const {
  if (state_ == State::kUp || state_ == State::kDown) return kNever;
  return state_ == State::kDialing ? dial_at_ : deadline_;
}

absl::Status Connection::dial() {
  auto socket = PacketSocket::dial(request_.address);
  if (!socket.ok()) return socket.status();
  socket_ = *std::move(socket);
  state_ = State::kHandshake;
  if (absl::Status status = watch(false); !status.ok()) return status;
  return flush_handshake();
}

absl::Status Connection::flush_handshake() {
  while (!handshake_->to_send().empty()) {
    const size_t bytes = handshake_->to_send().size();
    // The few packets of a handshake always fit into a new socket's buffer.
    if (socket_.send(handshake_->to_send()) != PacketSocket::Io::kDone) {
      return absl::UnavailableError("the peer closed the connection during the handshake");
    }
    handshake_->sent(bytes);
  }
  return absl::OkStatus();
}

absl::Status Connection::on_handshake_bytes(std::string_view bytes) {
  handshake_in_.append(bytes);
  if (handshake_in_.size() > 4 * kMaxMessage) {
    return absl::InvalidArgumentError("the peer sent too much during the handshake");
  }
  absl::Status status;
  while (status.ok() && !handshake_->done() && handshake_in_.size() >= handshake_->wanted()) {
    const size_t want = handshake_->wanted();
    status = handshake_->receive(std::string_view(handshake_in_).substr(0, want));
    handshake_in_.erase(0, want);
  }
  absl::Status flushed = flush_handshake();
  if (!status.ok()) return status;
  if (!flushed.ok() || !handshake_->done()) return flushed;
  if (handshake_->purpose() != net::Handshake::Purpose::kRail) {
    return absl::UnimplementedError("shm answers no queries");
  }
  if (!handshake_in_.empty()) {
    return absl::InvalidArgumentError("the peer sent bytes after the handshake's end");
  }
  peer_ = handshake_->peer();
  if (client_) peer_.link = link_;
  if (client_ && request_.expected.uid != WorkerUid{} && peer_.uid != request_.expected.uid) {
    return absl::NotFoundError(
        "another worker answers at this address: the peer was restarted; get its address again");
  }
  return begin_setup();
}

absl::Status Connection::begin_setup() {
  handshake_.reset();
  state_ = State::kSetup;
  peer_pid_ = socket_.peer_pid();
  if (peer_pid_ != 0 && peer_pid_ != getpid()) {
    // The socket tells of the peer's end too, unless a child of it holds a copy of the descriptor.
    pidfd_ = base::UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, peer_pid_, 0)));
    if (pidfd_.valid()) {
      epoll_event event{.events = EPOLLIN, .data = {.u64 = reinterpret_cast<uint64_t>(this) | 1}};
      epoll_ctl(shared_.epoll.get(), EPOLL_CTL_ADD, pidfd_.get(), &event);
    }
  }
  Message setup;
  setup.kind = Message::Kind::kSetup;
  setup.control_bytes = sizeof(ControlSegment);
  setup.counter_bytes = CounterTable::kBytes;
  setup.nonce_address = shared_.exports.gate().address();
  setup.nonce = shared_.exports.gate().nonce();
  if (shared_.ask_yama) allow_cma(peer_pid_);  // before the peer tries
  if (client_) {
    auto segment = create_file("baton-connection", sizeof(ConnectionSegment));
    if (!segment.ok()) return segment.status();
    segment_fd_ = std::move(segment->fd);
    segment_ = std::move(segment->mapping);
    setup.connection_bytes = sizeof(ConnectionSegment);
  }
  send(std::move(setup));
  for (const Exports::File& file : shared_.exports.files()) announce_file(file.number);
  return absl::OkStatus();
}

absl::Status Connection::on_setup(const Message& setup, Packet& packet, EventSink& sink) {
  if (state_ != State::kSetup) {
    return absl::InvalidArgumentError("the peer sent its setup twice");
  }
  const uint64_t connection_bytes = client_ ? 0 : sizeof(ConnectionSegment);
  if (setup.control_bytes != sizeof(ControlSegment) ||
      setup.counter_bytes != CounterTable::kBytes || setup.connection_bytes != connection_bytes) {
    return absl::FailedPreconditionError(
        "the peer uses a different layout of shared memory: run the same build of Baton on both "
        "sides");
  }
  using Protection = MappedFile::Protection;
  auto control = MappedFile::map(packet.fds[0].get(), sizeof(ControlSegment), Protection::kReadOnly,
                                 "control segment");
  if (!control.ok()) return control.status();
  auto counters = MappedFile::map(packet.fds[1].get(), CounterTable::kBytes, Protection::kReadWrite,
                                  "counter table");
  if (!counters.ok()) return counters.status();
  if (!client_) {
    auto segment = MappedFile::map(packet.fds[2].get(), sizeof(ConnectionSegment),
                                   Protection::kReadWrite, "connection segment");
    if (!segment.ok()) return segment.status();
    segment_ = *std::move(segment);
  }
  counters_ = *std::move(counters);
  auto* lanes = segment_.as<ConnectionSegment>();
  out_ = client_ ? &lanes->from_client : &lanes->from_server;
  in_ = client_ ? &lanes->from_server : &lanes->from_client;
  const CmaPeer peer{
      .pid = peer_pid_, .process = pidfd_.get(), .gate = setup.nonce_address, .nonce = setup.nonce};
  absl::Status cma = shared_.cma_allowed
                         ? probe_cma(peer)
                         : absl::FailedPreconditionError("CMA is switched off (shm.cma=off)");
  // A process does not open its own handles, and needs no marks for that.
  memory_.emplace(*std::move(control), peer, std::move(cma), out_);
  runner_.emplace(*memory_, *out_, counters_.as<CounterTable::Word>(), shared_.cma,
                  shared_.context.regions, shared_.device_kernels);
  reader_.emplace(*in_);
  state_ = State::kUp;
  deadline_ = kNever;

  Rail::Properties properties;
  properties.provider = "shm";
  properties.route = absl::StrFormat(
      "shm to process %d (one copy, %s; %s)", peer_pid_, base::stream_kernel(),
      memory_->cma().ok() ? "pools mapped, other memory by CMA" : "pools mapped, no CMA");
  properties.bytes_per_second = 10e9;
  properties.depth = kDepth;
  auto rail = std::make_unique<ShmRail>(shared_from_this(), std::move(properties));
  rail_ = rail.get();
  if (client_) {
    sink.connected(request_.session, peer_, std::move(rail));
  } else {
    sink.accepted(peer_, std::move(rail));
  }
  if (state_ != State::kUp) return absl::OkStatus();  // no peer wants it
  in_->open.store(1, std::memory_order_release);
  tell_peer();
  return absl::OkStatus();
}

absl::Status Connection::on_packet(Packet& packet, EventSink& sink) {
  if (state_ == State::kHandshake) return on_handshake_bytes(packet.view());
  auto message = Message::decode(packet.view());
  if (!message.ok()) return message.status();
  if (packet.fd_count != message->expected_fds(/*from_client=*/!client_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer sent %u descriptors with a message of kind %d", packet.fd_count,
                        static_cast<int>(message->kind)));
  }
  return on_message(*message, packet, sink);
}

absl::Status Connection::on_message(const Message& message, Packet& packet, EventSink& sink) {
  switch (message.kind) {
    case Message::Kind::kSetup:
      return on_setup(message, packet, sink);
    case Message::Kind::kGoodbye:
      goodbye_ = absl::CHexEscape(message.text);
      break;
    case Message::Kind::kDoorbell:
      break;
    case Message::Kind::kFile:
    case Message::Kind::kDeviceFile:
    case Message::Kind::kDeviceHandle:
    case Message::Kind::kDrop:
      if (state_ != State::kUp) {
        return absl::InvalidArgumentError("the peer sent files before its setup");
      }
      if (message.kind == Message::Kind::kFile) {
        return memory_->add_file(message.file, packet.fds[0].get(), message.file_bytes);
      }
      if (message.kind == Message::Kind::kDeviceFile) {
        return memory_->add_device_file(
            message.file, std::move(packet.fds[0]),
            {.bytes = message.file_bytes, .device_uuid = message.device_uuid});
      }
      if (message.kind == Message::Kind::kDeviceHandle) {
        // Do not trust the peer's addresses: the kernel tells whether they are ours.
        return memory_->add_device_file(message.file, base::UniqueFd(),
                                        {.allocation = message.allocation,
                                         .bytes = message.file_bytes,
                                         .device_uuid = message.device_uuid,
                                         .by_handle = true,
                                         .handle = message.handle,
                                         .same_process = peer_pid_ == getpid()});
      }
      memory_->drop_file(message.file);
      break;
  }
  return absl::OkStatus();
}

void Connection::announce_file(uint64_t number) {
  if (state_ != State::kSetup && state_ != State::kUp) return;
  Message message;
  const Exports::File* file = shared_.exports.find_file(number);
  message.kind = file == nullptr || !file->on_device ? Message::Kind::kFile
                 : file->exported.by_handle          ? Message::Kind::kDeviceHandle
                                                     : Message::Kind::kDeviceFile;
  message.file = number;
  send(std::move(message));
}

void Connection::announce_drop(uint64_t number) {
  if (state_ != State::kSetup && state_ != State::kUp) return;
  // A peer that does not read its socket has not heard of it, and need not: so what waits for it
  // does not grow while files come and go.
  const auto announces = [number](const Message& message) {
    return message.file == number &&
           (message.kind == Message::Kind::kFile || message.kind == Message::Kind::kDeviceFile ||
            message.kind == Message::Kind::kDeviceHandle);
  };
  if (std::erase_if(out_queue_, announces) > 0) return;
  Message message;
  message.kind = Message::Kind::kDrop;
  message.file = number;
  send(std::move(message));
}

void Connection::send(Message message) {
  out_queue_.push_back(std::move(message));
  flush();
}

void Connection::flush() {
  while (!out_queue_.empty()) {
    Message& message = out_queue_.front();
    std::array<int, kMaxMessageFds> fds{};
    if (message.kind == Message::Kind::kSetup) {
      fds = {shared_.exports.control_fd(), shared_.context.counters.fd(), segment_fd_.get()};
    } else if (message.kind == Message::Kind::kFile || message.kind == Message::Kind::kDeviceFile ||
               message.kind == Message::Kind::kDeviceHandle) {
      const Exports::File* file = shared_.exports.find_file(message.file);
      if (file == nullptr) {  // deregistered before it could be sent
        out_queue_.pop_front();
        continue;
      }
      message.file_bytes = file->bytes;
      message.device_uuid = file->exported.device_uuid;
      message.allocation = file->exported.allocation;
      message.handle = file->exported.handle;
      fds[0] = file->fd.get();
    }
    const auto io =
        socket_.send(message.encode(), absl::MakeSpan(fds.data(), message.expected_fds(client_)));
    if (io != PacketSocket::Io::kDone) break;  // a closed socket is noticed when it is read
    out_queue_.pop_front();
  }
  watch(!out_queue_.empty()).IgnoreError();  // watched already: needs no memory
}

}  // namespace baton::shm

// A reference for the harness: messages over one TCP connection for each comm, moved inside test(),
// with the size before the data, as NCCL's built-in Socket network does it. Tests only.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>

#include "plugins/nccl/abi_net.h"

namespace baton::nccl {
namespace {

constexpr size_t kInFlight = 32;

struct Request {
  bool used = false;
  bool sends = false;
  std::byte* data = nullptr;
  uint64_t size = 0;  // of the message; of a receive: room until the size has come
  uint64_t room = 0;
  uint64_t header = 0;
  size_t moved = 0;  // of header and data
  struct Comm* comm = nullptr;
};
struct Comm {
  int fd = -1;
  bool sends = false;
  std::array<Request, kInFlight> pool;
  std::deque<Request*> queue;
  ~Comm() {
    if (fd >= 0) close(fd);
  }
};
struct Listener {
  int fd = -1;
  ~Listener() {
    if (fd >= 0) close(fd);
  }
};
struct Address {
  sockaddr_in at;
  Comm* comm;  // that connect() has begun
};

void set_up(int fd) {
  fcntl(fd, F_SETFL, O_NONBLOCK);
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

Result init(void** context, uint64_t, NetConfig*, Logger, ProfilerCallback) {
  *context = nullptr;
  return Result::kSuccess;
}
Result devices(int* count) {
  *count = 1;
  return Result::kSuccess;
}
Result properties(int device, PropertiesV12* out) {
  *out = {};
  out->name = "lo";
  out->pointers = kHostPointer;
  out->speed = 10'000;
  out->max_comms = 65'536;
  out->max_receives = 1;
  out->virtual_device = {1, {device}};
  out->max_p2p_bytes = out->max_collective_bytes = size_t{1} << 40;
  out->max_multi_request = 1;
  return Result::kSuccess;
}

Result listen(void*, int, void* handle, void** out) {
  auto made = std::make_unique<Listener>();
  made->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  Address address{};
  address.at.sin_family = AF_INET;
  address.at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address.at;
  auto* const name = reinterpret_cast<sockaddr*>(&address.at);
  if (bind(made->fd, name, size) != 0 || ::listen(made->fd, 128) != 0 ||
      getsockname(made->fd, name, &size) != 0) {
    return Result::kSystemError;
  }
  fcntl(made->fd, F_SETFL, O_NONBLOCK);
  std::memcpy(handle, &address, sizeof address);
  *out = made.release();
  return Result::kSuccess;
}
Result connect(void*, int, void* handle, void** out, NetDeviceHandle**) {
  *out = nullptr;
  Address address;
  std::memcpy(&address, handle, sizeof address);
  if (address.comm == nullptr) {
    address.comm = new Comm;
    address.comm->sends = true;
    address.comm->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    set_up(address.comm->fd);
  }
  std::memcpy(handle, &address, sizeof address);
  const int done =
      ::connect(address.comm->fd, reinterpret_cast<sockaddr*>(&address.at), sizeof address.at);
  if (done == 0 || errno == EISCONN) {
    *out = address.comm;
    return Result::kSuccess;
  }
  return errno == EINPROGRESS || errno == EALREADY ? Result::kSuccess : Result::kRemoteError;
}
Result accept(void* listener, void** out, NetDeviceHandle**) {
  *out = nullptr;
  const int fd = accept4(static_cast<Listener*>(listener)->fd, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return errno == EAGAIN ? Result::kSuccess : Result::kSystemError;
  set_up(fd);
  auto* const comm = new Comm;
  comm->fd = fd;
  *out = comm;
  return Result::kSuccess;
}
Result register_memory(void*, void* data, size_t, int type, void** memory) {
  *memory = data;
  return type == kHostPointer ? Result::kSuccess : Result::kInternalError;
}
Result deregister(void*, void*) { return Result::kSuccess; }

Request* take(Comm& comm) {
  for (Request& request : comm.pool) {
    if (request.used) continue;
    request = {};
    request.used = true;
    request.comm = &comm;
    comm.queue.push_back(&request);
    return &request;
  }
  return nullptr;
}
Result send(void* comm, void* data, size_t size, int, void*, void*, void** out) {
  Request* const request = take(*static_cast<Comm*>(comm));
  *out = request;
  if (request == nullptr) return Result::kSuccess;
  request->sends = true;
  request->data = static_cast<std::byte*>(data);
  request->size = request->header = size;
  return Result::kSuccess;
}
Result receive(void* comm, int count, void** data, size_t* sizes, int*, void**, void**,
               void** out) {
  if (count != 1) return Result::kInternalError;
  Request* const request = take(*static_cast<Comm*>(comm));
  *out = request;
  if (request == nullptr) return Result::kSuccess;
  request->data = static_cast<std::byte*>(data[0]);
  request->room = sizes[0];
  return Result::kSuccess;
}
Result flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return Result::kSuccess;
}

// Moves what the socket takes or has; false: the connection is broken.
bool move(Request& request) {
  for (;;) {
    const bool header = request.moved < sizeof request.header;
    const size_t whole = sizeof request.header + request.size;
    if (!header && request.moved == whole) return true;
    std::byte* const at = header ? reinterpret_cast<std::byte*>(&request.header) + request.moved
                                 : request.data + (request.moved - sizeof request.header);
    const size_t left = header ? sizeof request.header - request.moved : whole - request.moved;
    const ssize_t done = request.sends ? ::send(request.comm->fd, at, left, MSG_NOSIGNAL)
                                       : recv(request.comm->fd, at, left, 0);
    if (done == 0 && !request.sends) return false;
    if (done < 0) return errno == EAGAIN || errno == EINTR;
    request.moved += static_cast<size_t>(done);
    if (header && request.moved == sizeof request.header && !request.sends) {
      request.size = request.header;
      if (request.size > request.room) return false;  // truncated: Socket gives up too
    }
  }
}
bool over(const Request& request) {
  return request.moved >= sizeof request.header &&
         request.moved == sizeof request.header + request.size;
}

Result test(void* pointer, int* done, int* sizes) {
  auto* const request = static_cast<Request*>(pointer);
  *done = 0;
  Comm& comm = *request->comm;
  while (!comm.queue.empty()) {
    Request& first = *comm.queue.front();
    if (!move(first)) return Result::kRemoteError;
    if (!over(first)) break;
    comm.queue.pop_front();
  }
  if (!over(*request)) return Result::kSuccess;
  if (sizes != nullptr) *sizes = static_cast<int>(request->size);
  request->used = false;
  *done = 1;
  return Result::kSuccess;
}
Result close_comm(void* comm) {
  delete static_cast<Comm*>(comm);
  return Result::kSuccess;
}
Result close_listen(void* listener) {
  delete static_cast<Listener*>(listener);
  return Result::kSuccess;
}
Result finalize(void*) { return Result::kSuccess; }

}  // namespace

extern "C" const NetV12 ncclNetPlugin_v12 = {.name = "SocketReference",
                                             .init = init,
                                             .devices = devices,
                                             .properties = properties,
                                             .listen = listen,
                                             .connect = connect,
                                             .accept = accept,
                                             .register_memory = register_memory,
                                             .deregister = deregister,
                                             .send = send,
                                             .receive = receive,
                                             .flush = flush,
                                             .test = test,
                                             .close_send = close_comm,
                                             .close_receive = close_comm,
                                             .close_listen = close_listen,
                                             .finalize = finalize};

}  // namespace baton::nccl

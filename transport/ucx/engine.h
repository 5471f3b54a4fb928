// UCX as this provider uses it: endpoints to peers, and messages that are sent to them and received
// from any peer.
//
// UCX reads and writes only packets that belong to the engine, never memory of the application: so
// nothing that UCX still has under way can touch a page whose transfer has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/region.h"
#include "transport/ucx/library.h"

namespace baton::ucx {

class Engine;

// The way to one worker of a peer, for all rails there. Belongs to the engine.
struct Endpoint {
  Engine* engine = nullptr;
  ucp_ep_h handle = nullptr;
  std::string address;      // of the peer's engine
  absl::Status failure;     // what UCX says has happened to it
  uint32_t users = 0;       // rails
  uint32_t under_way = 0;   // packets that UCX holds
  uint64_t completed = 0;   // packets that it has given back
  bool silent = false;      // a rail has waited for its peer in vain
  void* closing = nullptr;  // the request that closes it
};

inline constexpr size_t kMessageBytes = 72 << 10;  // the longest

struct Packet {
  Endpoint* endpoint = nullptr;  // while UCX holds it
  size_t capacity = 0;
  std::unique_ptr<char[]> data;
};

class Engine {
 public:
  struct Options {
    std::string tls;          // "": UCX decides
    std::string net_devices;  // "": UCX decides
  };
  // A message that has arrived, from any sender: not authenticated. Called from within progress().
  using Receiver = std::function<void(std::string_view message)>;

  static absl::StatusOr<std::unique_ptr<Engine>> create(const Options& options, Receiver receiver);
  // Whether UCX finds something here that these options allow.
  static absl::Status check(const Options& options);
  // Destroys the engine, once what it has sent has left. One that a peer has stopped listening to
  // is set aside after a moment, and destroyed when that peer has gone: UCX would wait for it.
  static void end(std::unique_ptr<Engine> engine);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // UCX ends the process when it finds no descriptor for what it starts (ucs_async_thread_start())
  // and stops listening when it finds none for a caller: so many are asked for before it is
  // started, more where there are many interfaces, and so many before an endpoint is made. What
  // another thread opens meanwhile is counted in.
  static constexpr size_t kToStart = 32, kForInterface = 4, kForEndpoint = 16;
  // ResourceExhausted, with the limit, where so many descriptors are not free.
  static absl::Status descriptors_are_free(size_t wanted);

  const std::string& address() const { return address_; }  // for connect() of others
  int fd() const { return fd_; }
  bool arm() { return ucx_.ucp_worker_arm(worker_) == UCS_OK; }
  bool progress();
  // Whether UCX holds packets. Some of its transports move them on in progress() only, and wake
  // no caller when there is room again.
  bool holds_packets() const;

  // The endpoint to the engine of that address, shared by all that ask for it. It is kept for
  // the next who does until UCX says that the peer has gone: taking it back from a peer that lives
  // but does not listen is what UCX (1.13, tcp) does not survive. One that is silent is kept too,
  // but given to no other worker before there are kMostSilent of them: it may never speak again,
  // and UCX not know that for a quarter of an hour, as when a firewall has forgotten its
  // connection.
  static constexpr size_t kMostSilent = 32;
  absl::StatusOr<Endpoint*> connect(const std::string& address);
  void release(Endpoint* endpoint) { untidy_ |= --endpoint->users == 0; }
  // Whether an endpoint has failed since the last call: those who use one should look at it.
  bool take_failures() { return std::exchange(failed_, false); }

  // An empty packet for at least this many bytes. Allocates only where none is free.
  Packet* acquire(size_t bytes);
  // Returns a packet that is not sent after all.
  void give_back(Packet* packet);
  // Sends its first `bytes` bytes; UCX holds it until they are on their way.
  void send(Endpoint& endpoint, Packet* packet, size_t bytes);

 private:
  static constexpr size_t kSmallPacket = 1024;
  static constexpr int kBurst = 64;  // rounds of UCX in one progress()

  Engine(const Library& library, Receiver receiver);
  absl::Status open(const Options& options);
  absl::Status start();
  std::string text(ucs_status_t status) const { return ucx_.ucs_status_string(status); }
  void close(Endpoint& endpoint, uint32_t flags);
  bool collect();
  bool all_closed();
  static void sweep();
  void done(Packet* packet, ucs_status_t status);
  void failed(Endpoint& endpoint, ucs_status_t status);
  static ucs_status_t on_message(void* self, const void* header, size_t header_bytes, void* data,
                                 size_t bytes, const ucp_am_recv_param_t* param);
  static void on_error(void* endpoint, ucp_ep_h, ucs_status_t status);
  static void on_sent(void* request, ucs_status_t status, void* packet);

  const Library& ucx_;
  Receiver receiver_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int fd_ = -1;
  std::string address_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  uint32_t under_way_ = 0;  // packets, of all endpoints
  bool untidy_ = false;     // there may be endpoints that collect() would do something about
  bool failed_ = false;
  std::vector<std::unique_ptr<Packet>> packets_;
  std::vector<Packet*> free_small_;
  std::vector<Packet*> free_large_;
};

}  // namespace baton::ucx

// One connection between two shm providers, from the first byte on its socket to its end.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/net/handshake.h"
#include "transport/provider.h"
#include "transport/shm/exports.h"
#include "transport/shm/packet_socket.h"
#include "transport/shm/peer_memory.h"
#include "transport/shm/slice_runner.h"

namespace baton::shm {

class Connection;

// The rest of a closed connection, kept while the peer has device memory of ours open or is stopped
// in a copy: its lane, and a descriptor that shows the end of its process.
struct Parted {
  MappedFile segment;
  Lane* in = nullptr;
  base::UniqueFd process;
  pid_t pid = 0;
  uint32_t copying = 0;  // 1 + index of the region; 0: none that has not been told of
};

// The state that the connections of one provider share.
struct Shared {
  const ProviderContext& context;
  Exports exports;
  CmaBatch cma;
  bool cma_allowed = true;
  bool ask_yama = true;        // shm.ptracer
  bool populate = true;        // shm.populate
  Time fence_patience{};       // shm.fence_ms
  bool device_kernels = true;  // staging.kernels
  base::UniqueFd epoll;
  // The connections that each round polls. A connection that was silent for long is not polled
  // until a slice is posted to it or its socket has a message: it is armed, as if the worker slept.
  std::vector<Connection*> hot;
  bool bell_owed = false;  // by one of them: there is a peer to be woken
  std::vector<Parted> parted = {};
};

// Asks the peers that we are parted from to close file `number` (0: all).
void ask_parted(const Shared& shared, uint64_t number);
// And waits until none has it open. Unavailable: one has. May be freed now what no peer has.
absl::Status wait_for_parted(Shared& shared, uint64_t number, Time until);
// A closed connection whose peer is stopped in a copy to or from that region; null if there is
// none.
Parted* copying_still(Shared& shared, uint32_t region);
// Unavailable, and who, once: one is.
absl::Status tell_copying(Shared& shared, uint32_t region);
// While this process waits for others, which may wait for it.
void serve_hot(const Shared& shared);

class ShmRail;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  enum class State { kDialing, kHandshake, kSetup, kUp, kDown };

  Connection(Shared& shared, ConnectRequest request);  // we connect
  Connection(Shared& shared, PacketSocket socket);     // a peer connected to us
  ~Connection();

  State state() const { return state_; }
  // A peer dialed and has not authenticated itself yet.
  bool stranger() const { return !client_ && state_ == State::kHandshake; }
  // True while the caller has not even named a key of ours (net::Handshake).
  bool silent() const { return stranger() && !handshake_->names_our_key(); }
  // Gone for good, and no object holds its rail: may be forgotten.
  bool finished() const { return state_ == State::kDown && rail_ == nullptr; }

  // From the provider's progress(), while the connection is hot.
  bool run(EventSink& sink, size_t budget);  // news from the peer, and copying
  // True when nothing has come for so many rounds of run() that the connection was cooled.
  bool cool(bool moved);
  bool on_socket(EventSink& sink);          // packets wait
  void on_peer_exit(EventSink& sink);       // its process has ended
  bool on_time(Time now, EventSink& sink);  // dials; gives up what takes too long
  Time next_timer() const;

  bool polls() const { return state_ == State::kUp && runner_->on_devices(); }
  // Sleeping: false when there is work already.
  bool arm();
  void disarm();

  // The provider goes away, though the worker still holds the rail.
  void abandon();

  // Regions of ours.
  void announce_file(uint64_t number);
  void announce_drop(uint64_t number);
  // Whether the peer, if alive, copies nothing to or from region `index`, which was revoked.
  bool fenced(uint32_t index) const;
  // Whether the peer, if alive, has closed the handle of a file that was dropped, and that it was
  // asked for.
  void ask_back(uint64_t number);
  bool given_back(uint64_t number) const;
  // It has not in time: it has been stopped in a copy of a region, or has a handle open. The
  // connection ends; what Unavailable says is for whoever would free the memory.
  absl::Status cut_off(std::optional<uint32_t> copying, EventSink& sink);
  // While this process waits for others, which may wait for it: what has ended, and handles.
  void serve_waiters();

  // For the rail.
  bool post(const Slice& slice);
  bool write_now(const TransferDescriptor& write, const std::byte* from);
  void abort(TransferId transfer, EventSink& sink);
  void close(const absl::Status& why, EventSink& sink);
  void rail_destroyed();
  absl::Status reaches(const RemoteRegion& remote) const;
  absl::StatusOr<RemoteView> view(const RemoteRegion& remote) const;
  absl::Status maps(const RegionEntry& local, const RemoteRegion& remote) const;
  std::string about_devices() const;

 private:
  // connection_setup.cc
  absl::Status watch(bool for_writing);
  absl::Status dial();
  absl::Status on_handshake_bytes(std::string_view bytes);
  absl::Status flush_handshake();
  absl::Status begin_setup();
  absl::Status on_setup(const Message& setup, Packet& packet, EventSink& sink);
  absl::Status on_message(const Message& message, Packet& packet, EventSink& sink);
  absl::Status on_packet(Packet& packet, EventSink& sink);
  void send(Message message);
  void flush();

  // connection.cc
  void heat();
  bool receive(EventSink& sink);
  void tell_peer();
  void ring_doorbell();
  bool wait_until_idle(uint32_t busy_value, Time patience) const;
  bool wait_until_copied(uint32_t mark, Time patience) const;
  void fail(const absl::Status& why, EventSink& sink);
  void peer_closed(bool ended, EventSink& sink);
  void drain(EventSink& sink);
  void release();
  std::string peer_label() const;

  Shared& shared_;
  const bool client_;
  bool hot_ = false;
  bool draining_ = false;      // the end has begun
  bool stands_still_ = false;  // the peer, which was waited for already
  uint32_t silent_rounds_ = 0;
  ConnectRequest request_;  // of a client
  State state_;
  Time deadline_ = kNever;  // of everything before kUp
  Time dial_at_{};
  PacketSocket socket_;
  base::UniqueFd pidfd_;
  bool watched_ = false;
  bool watching_writes_ = false;
  std::optional<net::Handshake> handshake_;
  std::string handshake_in_;
  HelloInfo peer_;
  uint64_t link_ = 0;  // of a client
  pid_t peer_pid_ = 0;
  std::string goodbye_;  // what the peer said before it closed
  std::deque<Message> out_queue_;

  // From kSetup and kUp on.
  base::UniqueFd segment_fd_;
  MappedFile segment_;
  MappedFile counters_;
  Lane* in_ = nullptr;
  Lane* out_ = nullptr;
  std::optional<PeerMemory> memory_;
  std::optional<SliceRunner> runner_;
  std::optional<RingReader> reader_;
  bool bell_owed_ = false;  // the peer sleeps, and has not been woken
  ShmRail* rail_ = nullptr;
};

// The worker's side of a connection.
class ShmRail final : public Rail {
 public:
  ShmRail(std::shared_ptr<Connection> connection, Properties properties)
      : connection_(std::move(connection)), properties_(std::move(properties)) {}
  ~ShmRail() override { connection_->rail_destroyed(); }

  const Properties& properties() const override { return properties_; }
  absl::Status reaches(const RemoteRegion& remote) const override {
    return connection_->reaches(remote);
  }
  absl::StatusOr<RemoteView> view(const RemoteRegion& remote) const override {
    return connection_->view(remote);
  }
  absl::Status maps(const RegionEntry& local, const RemoteRegion& remote) const override {
    return connection_->maps(local, remote);
  }
  std::string about_devices() const override { return connection_->about_devices(); }
  bool shows_files() const override { return true; }
  bool write_now(const TransferDescriptor& write, const std::byte* from) override {
    return connection_->write_now(write, from);
  }
  bool post(const Slice& slice, EventSink&) override { return connection_->post(slice); }
  void abort(TransferId transfer, EventSink& sink) override { connection_->abort(transfer, sink); }
  void close(absl::Status why, EventSink& sink) override { connection_->close(why, sink); }

 private:
  std::shared_ptr<Connection> connection_;
  Properties properties_;
};

}  // namespace baton::shm

// How workers meet over TCP: one listens, the other dials, both prove themselves. Every provider
// whose peers meet this way has one Acceptor, and hears of a peer once that peer is authenticated.
//
// What comes of it:
//
//   connect() --> a Dial (dial.h), which tries the endpoints of the address in turns
//                   --> `met`, with the Dial           the peer is there and is the right one
//                   --> EventSink::connect_failed()    no endpoint would do; says why, of each
//   query()   --> EventSink::resolved()                the peer's Address, or why there is none
//   a caller  --> `met`, without a Dial                it holds the cluster key
//             --> nothing                              it does not, or it only asked a query
//
// A provider that cannot use a peer it has met hands the Dial back with try_next(), which goes on
// with the endpoint after that one.
//
// What it guarantees:
//   - No peer that has not proved itself holds a place for longer than Options::patience, whatever
//   it
//     sends.
//   - Strangers do not keep peers out. There are kMaxHalfOpen places for callers; when they are
//     taken, a call from the host with the most calls makes room for the next one: the oldest that
//     has not named a key of ours, else the oldest. A host that floods therefore pushes out its own
//     calls, not those of others, and of those no peer's that has begun to speak.
//   - Running out of descriptors costs callers kLookAway and no spinning: for so long no code looks
//     at the listener. Callers wait in the kernel's queue meanwhile.
//   - A dial succeeds only with the worker that was asked for, where its uid was given.
//   - Every connect() and query() is answered once, from inside progress().
//
// Threads: none of its own, no locks; all calls come from the provider's thread.
// Ownership: it owns the listener and every connection until `met` has it. It uses `context` and
// the poller for as long as it lives, which must outlive it.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/net/dial.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake_connection.h"
#include "transport/provider.h"

namespace baton::net {

class Acceptor {
 public:
  static constexpr size_t kMaxHalfOpen = 64;  // callers that have not proved themselves yet
  static constexpr size_t kMaxMet = 65'536;   // peers whose last address is remembered
  static constexpr Time kLookAway = std::chrono::milliseconds(100);
  // How often a dial calls where it was hung up on before a word was said, as a worker does that is
  // flooded with callers.
  static constexpr int kCalls = 6;

  using Dial = net::Dial;
  // Short messages come through also where large packets vanish. A dial may look for that: it
  // exchanges a message that fills a packet, and where that does not arrive within a quarter of the
  // patience, or the answer that fills one does not, though its beginning has come, the endpoint
  // has failed, or is called again with smaller segments (dial.h). So do queries, always, since
  // their answers may be long.
  enum class LargePackets { kNotLookedAt, kMustPass, kOrSmallSegments };
  struct Options {
    uint16_t port = 0;  // of the listener, on context.listen_host; 0: any
    // The ports in context.advertise are of this listener; otherwise its hosts alone count.
    bool advertised_ports = false;
    SocketOptions sockets;
    Time patience = std::chrono::seconds(5);       // for one handshake, connecting included
    std::string patience_setting;                  // "tcp.handshake_ms": named when it expires
    std::function<std::string()> extra = nullptr;  // HelloInfo::extra, asked for each connection
    Protections offers = kHeadsOnly;               // Handshake::Options
    Protections needs = kHeadsOnly;
    LargePackets large_packets = LargePackets::kNotLookedAt;
    // A call of connect_another() has failed, from progress().
    std::function<void(const Dial& dial)> another_failed = nullptr;
  };

  // A peer has proved itself. The socket is the callee's to close. `peer` carries the session,
  // link, rail and rails of the Dial, or, without one, those that the peer chose.
  using Met =
      std::function<void(Link link, HelloInfo peer, std::unique_ptr<Dial> dial, EventSink&)>;

  // `provider`: its name, for messages.
  Acceptor(const ProviderContext& context, std::string provider, Met met);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Before listen(), connect() and query().
  void open(Poller& poller, Options options);
  // Starts listening; returns the addresses to hand out, as Provider::listen() does.
  absl::StatusOr<std::string> listen();
  uint16_t port() const;  // 0: it does not listen
  // The answer to queries.
  void set_worker_address(const std::string& encoded) { worker_address_ = encoded; }

  // Dials request.address, "host:port[,host:port]", and request.called. `rails`: how many
  // connections the session will have.
  void connect(const ConnectRequest& request, uint16_t rails = 1);
  // As connect(), where the provider knows already that it will fail. Needs no open().
  void refuse(const ConnectRequest& request, const absl::Status& why);
  // Another connection of the session of `first`, to `peer` at the first of `endpoints` that
  // answers; none: where that was met. No sink is told when it fails: the session lives on the
  // connections it has. `owner` goes into its Dial, and so does `full_only`.
  void connect_another(const Dial& first, const HelloInfo& peer, uint16_t rail,
                       std::shared_ptr<void> owner = nullptr, std::vector<Endpoint> endpoints = {},
                       bool full_only = false);
  absl::Status query(uint64_t session, const std::string& addresses);
  // The peer that `dial` has met will not do.
  void try_next(std::unique_ptr<Dial> dial, const absl::Status& why);

  // To be called after each Poller::poll(), by next_timer(), and while busy().
  bool progress(EventSink& sink);
  // A peer is being met, or there is an outcome to report.
  bool busy() const { return !calls_.empty() || !failed_.empty(); }
  // False: progress() has something to report, so that no thread should sleep.
  bool arm() const { return failed_.empty(); }
  Time next_timer() const;

 private:
  struct Call {
    std::unique_ptr<HandshakeConnection> handshake;
    std::unique_ptr<Dial> dial;  // null: they called us
    Endpoint from;               // of a caller
    Time silent_until = kNever;  // if there is no answer by then, another endpoint is tried
    Time full_until = kNever;    // until when what fills a packet may take
    HandshakeConnection::FullPacket full{};
  };

  std::unique_ptr<HandshakeConnection> start_handshake(int fd, Handshake::Role role,
                                                       const Dial* dial);
  void start(std::unique_ptr<Dial> dial);
  bool call_again(Call& call);
  void give_up(const Dial& dial, EventSink& sink) const;
  void accept_some(EventSink& sink);
  void make_room(EventSink& sink);
  bool advance_calls(EventSink& sink);
  void call_done(Call call, EventSink& sink);
  void met_at(const WorkerUid& peer, const Endpoint& where);
  void refused(const Call& caller, const absl::Status& why, EventSink& sink) const;

  const ProviderContext& context_;
  const std::string provider_;
  const Met met_;
  Poller* poller_ = nullptr;
  Options options_;
  std::string worker_address_;
  int listener_ = -1;
  Watched listener_watch_;
  Time look_again_ = kNever;  // at the listener
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<Dial>> failed_;
  // The last endpoint of each peer: a host that has moved is known by its last call.
  std::map<std::array<uint8_t, 16>, Endpoint> met_at_;
};

// Whether a worker on `host_id` that listens on `addresses` can be reached from `here`: not if that
// is another machine, or network namespace, and they are of its loopback interface, which is also
// what a machine has to tell whose other addresses are link-local. InvalidArgument: they are no
// addresses.
absl::Status reachable(const std::string& addresses, std::string_view host_id,
                       std::string_view here);

// Decides which caller is dropped when too many have not authenticated yet.

struct Caller {
  const Endpoint* from = nullptr;
  bool names_our_key = false;  // Handshake::names_our_key()
};

// `callers`: the oldest first; at least one. The one to drop is from the host with the most
// callers: a host that floods pushes out its own calls, not those of others. Of that host's calls,
// the oldest that has not named a key of ours goes first, because real peers may share a host with
// the flooder.
size_t caller_to_drop(const std::vector<Caller>& callers);

}  // namespace baton::net

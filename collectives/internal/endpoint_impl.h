// The inside of an endpoint: the worker and its memory, the processes that it talks to, and the
// groups that are told what comes from them.
//
// One lock guards the endpoint and all of its groups. Notifications begin with the id of the group
// that they are for; id 0 is the endpoint's own. What comes for a group that this process has not
// made yet is kept until it is.
#pragma once

#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/endpoint.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/memory.h"
#include "transport/base/threads/forks.h"
#include "transport/worker.h"

namespace baton::collectives::internal {

// The control messages between ranks: the byte behind the group's id.
enum class ControlMessage : char {
  // Between endpoints.
  kHello = 'h',    // where my RegionTable is
  kView = 'v',     // one byte: whether I can map your memory
  kGoodbye = 'g',  // my process leaves, in order
  // Between ranks of a group.
  kJoin = 'j',      // who I am there, and where what I publish is: see mesh_start.cc
  kLinked = 'l',    // my link to you is made
  kCall = 'c',      // TransferLink::Announcement: what I called
  kPacket = 'p',    // of a send or a receive: executor/link.h
  kAdd = 'a',       // to a word of a window of yours: windows.cc
  kBye = 'b',       // I leave the group, in order, or have left it
  kEnded = 'e',     // no byte of mine moves in this group any more
  kAbort = 'x',     // it is over, and why: see failure_detector.cc
  kQuery = 'q',     // Standing of mine: tell me yours
  kStanding = 's',  // Standing: an answer
  kBallot = 'k',    // who is lost: see survivors.cc
  kSlab = 'd',      // where memory of mine on a device is: see devices/device_exchange.h
};

// This machine's, for people.
std::string host_name();

// Another endpoint, as this one knows it.
struct Process {
  WorkerUid uid;
  Handle handle;
  bool has_handle = false;
  std::string address;  // the whole one, where it is known
  PeerId peer;
  bool known = false;  // `peer` is set
  bool up = false;     // connected
  bool down = false;   // was, or could not be
  absl::Status why_down;
  bool goodbye = false;  // left in order
  // A group of ours has ended the connection, for what could not be taken back: it is not dead.
  bool parted = false;
  uint64_t first_link = 0;  // id of the group whose TransferLink has large slots; 0: none
  Time called_at{};
  Time wanted_since = kNever;  // kNever: a connection is not waited for
  // Since it is up:
  bool told = false;  // where its RegionTable is
  RemoteRegion table;
  uint64_t table_offset = 0;
  int can_view = -1;  // whether it can map our memory; -1: not told yet
  int we_can_view = -1;
  RemoteView view;                  // of its RegionTable
  std::vector<std::string> unsent;  // told, and the worker had no transfer left for it

  bool ready() const { return up && can_view >= 0 && we_can_view >= 0; }
  bool direct() const { return can_view == 1 && we_can_view == 1; }
};

// Memory of a destroyed group that other ranks may still read or write.
class Remains {
 public:
  virtual ~Remains() = default;
  virtual void on_control_message(Process& from, ControlMessage kind) = 0;
  // True when neither other ranks nor our transfers need it any more.
  virtual bool over() = 0;
};

class EndpointImpl {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // A communicator, under the endpoint's lock.
  class Group {
   public:
    virtual ~Group() = default;
    virtual void on_control_message(Process& from, ControlMessage kind, std::string_view body) = 0;
    virtual void on_ready(Process& process) = 0;  // a link to it can be made
    virtual void on_goodbye(Process& process) = 0;
    virtual void on_down(Process& process, const absl::Status& why) = 0;
    virtual bool busy() const = 0;                     // it has calls that advance() advances
    virtual bool advance() = 0;                        // false: nothing happened
    virtual void look(Time now) = 0;                   // at deadlines, once a millisecond or so
    virtual bool idle() const = 0;                     // look() would find nothing
    virtual void set_sleeping(uint32_t sleepers) = 0;  // not 0: peers must wake us

   private:
    friend class EndpointImpl;
    bool added_ = false, awake_ = false;
  };
  // A call that has ended and whose callback is due.
  struct Ended {
    void (*on_end)(void* context, Work work, const absl::Status& status);
    void* context;
    uint64_t work;
    absl::Status status;
    // Tells the owner of the call that its callback has returned.
    void (*returned)(void* table, uint64_t work);
    void* table;
  };

  static absl::StatusOr<std::unique_ptr<EndpointImpl>> open(EndpointOptions options);
  ~EndpointImpl();
  EndpointImpl(const EndpointImpl&) = delete;
  EndpointImpl& operator=(const EndpointImpl&) = delete;

  static const std::array<char, Handle::kBytes>& bytes_of(const Handle& handle) {
    return handle.bytes_;
  }
  static std::string host_of(const Handle& handle);  // equal: one machine, one user
  static std::string host_name_of(const Handle& handle);
  static uint32_t pid_of(const Handle& handle);
  static absl::Status check(const Handle& handle);
  // Whether it and we can likely map each other's memory.
  bool maps_memory(const Handle& handle) const;

  // InvalidArgument in a forked child, where a thread that is not there may have the lock.
  absl::Status usable() const { return made_here_.elsewhere() ? forked() : absl::OkStatus(); }
  std::mutex& mutex() { return mutex_; }
  Worker& worker() { return *worker_; }
  const Handle& handle() const { return handle_; }
  const WorkerUid& uid() const { return uid_; }
  const EndpointOptions& options() const { return options_; }
  const Clock& clock() const { return worker_->clock(); }
  bool background() const { return background_.joinable(); }
  bool on_background_thread() const { return std::this_thread::get_id() == background_.get_id(); }

  // --- under the lock ---
  executor::Memory& memory() { return *memory_; }
  absl::StatusOr<CommBuffer> allocate(size_t bytes);
  void free(const CommBuffer& buffer);
  // Publishes regions of memory() that peers do not know yet. Cheap where there are none.
  absl::Status publish_regions() {
    return published_ < memory_->regions().size() ? publish_new_regions() : absl::OkStatus();
  }

  // The process behind a handle; the same object each time, as long as the endpoint lives.
  Process& process(const Handle& handle);
  // Its whole address, which spares asking for it.
  void learn(const Handle& handle, std::string address) {
    process(handle).address = std::move(address);
  }
  // Wants a connection: the lower uid calls, the other one waits a while for that first. What comes
  // of it is told by on_ready() or on_down().
  void want(Process& process);

  bool used(uint64_t id) const { return used_.contains(id); }
  static absl::Status used_before(uint64_t id);
  // AlreadyExists: the id was used before.
  absl::Status add_group(uint64_t id, Group& group);
  // `remains` may be null. Afterwards the group is told nothing any more.
  void remove_group(uint64_t id, std::unique_ptr<Remains> remains);
  // From here on the group is advanced and looked at, until look() leaves it idle(). Of thousands
  // of groups few have calls in flight.
  void wake(Group& group) {
    if (group.added_ && !group.awake_) wake_now(group);
  }
  // Delivers messages that came for the group before it was made.
  void deliver_kept(uint64_t id);

  // The header of every message between ranks.
  static constexpr size_t kHeadBytes = sizeof(uint64_t) + 1;
  static void write_head(uint64_t group, ControlMessage kind, char* out) {
    std::memcpy(out, &group, sizeof group);
    out[sizeof group] = static_cast<char>(kind);
  }
  // Goes out at the end of tick(), drain() or deliver_kept() at the latest, for the caller may
  // compute for a while after that; later, and in order, where the worker has no transfer left.
  void tell(Process& process, uint64_t group, ControlMessage kind, std::string_view body);
  // A round of the worker, what came of it, and what is due.
  bool tick();
  // When the last tick() looked at the clock: a look costs as much as the rest of an idle round.
  Time ticked_at() const { return ticked_at_; }
  // Handles messages before reports of lost peers: a rank that leaves or gives up says so before it
  // disconnects.
  void drain();
  // Advances all other groups that have calls.
  bool advance_others(const Group* but);
  void look_at_all(Time now);
  void note_end(Ended ended) { ended_.push_back(std::move(ended)); }
  bool any_ended() const { return !ended_.empty(); }
  // A thread is about to look a last time, and then sleeps; and no longer.
  void begin_sleep() { set_sleepers(sleepers_ + 1); }
  void end_sleep() { set_sleepers(sleepers_ - 1); }
  uint32_t sleepers() const { return sleepers_; }
  void call_started() { background_wakes_.notify_one(); }

  // --- without the lock ---
  // Runs callbacks that are due; false: none was.
  bool run_callbacks();
  // This thread runs a callback of a call of this table's.
  static bool in_callback_of(const void* table);
  // Sleeps until the worker has something to do. Take the ticket before the last look for work:
  // what has woken another sleeper since then is not slept through.
  uint64_t nap_ticket();
  void nap(Time longest, uint64_t ticket);
  bool progress();
  int event_fd();  // as of Endpoint

 private:
  static absl::Status forked();
  void wake_now(Group& group);
  struct Kept {
    Process* from;
    ControlMessage kind;
    std::string body;
  };

  explicit EndpointImpl(EndpointOptions options) : options_(std::move(options)) {}
  absl::Status start();
  void run_background();
  void set_sleepers(uint32_t sleepers);
  absl::Status publish_new_regions();
  Process& process_of(const WorkerUid& uid);
  template <typename... Args>
  void tell_groups(void (Group::*what)(Process&, Args...), Process& process, Args... args);
  Process* process_at(PeerId peer);
  void call(Process& process);
  void came_up(Process& process);
  void look_at_table(Process& process);
  void became_ready(Process& process);
  void go_down(Process& process, const absl::Status& why);
  void on_events();
  void on_notification(Process& from, std::string_view payload);
  void on_own_message(Process& from, ControlMessage kind, std::string_view body);
  void keep(uint64_t id, Process& from, ControlMessage kind, std::string_view body);
  void look_at_processes(Time now);
  bool send(const Process& process, std::string_view text);
  void flush();
  void say_goodbye();

  const base::MadeHere made_here_;
  EndpointOptions options_;
  std::mutex mutex_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<executor::Memory> memory_;
  Block table_memory_;
  executor::RegionTable* table_ = nullptr;
  size_t published_ = 0;
  std::vector<Block> buffers_;  // of callers; data null: free
  Handle handle_;
  WorkerUid uid_;

  std::map<std::array<uint8_t, 16>, std::unique_ptr<Process>> processes_;
  std::map<std::pair<uint32_t, uint32_t>, Process*> by_peer_;
  std::vector<Process*> unsettled_;  // wanted and not called yet, or up and not ready
  std::unordered_map<uint64_t, Group*> groups_;
  std::vector<Group*> all_;    // of them; by index, since one may take another id while it is told
  std::vector<Group*> awake_;  // of them; likewise
  std::unordered_set<uint64_t> used_;  // ids, ever
  std::unordered_map<uint64_t, std::vector<Kept>> kept_;
  std::deque<uint64_t> kept_ids_;  // oldest first
  std::unordered_map<uint64_t, std::unique_ptr<Remains>> remains_;
  std::deque<Ended> ended_;
  bool told_ = false;    // something that the worker has had no turn to send
  bool unsent_ = false;  // something is, of some process
  Time next_look_{};
  Time ticked_at_{};
  uint32_t sleepers_ = 0;
  bool caller_has_fd_ = false;  // event_fd() was asked for
  bool caller_sleeps_ = false;  // the last progress() has made us a sleeper
  Notification notification_;   // its memory is reused

  std::thread background_;
  bool stop_ = false;
  std::condition_variable background_wakes_;

  std::mutex nap_mutex_;
  std::condition_variable nap_over_;
  uint64_t naps_ = 0;
  bool napping_ = false;
};

}  // namespace baton::collectives::internal

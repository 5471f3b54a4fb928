// A strict fake of the CUDA driver, installed as its table of calls.
//
// Its device memory cannot be touched by the host: addresses are mapped without rights, and only
// the fake reaches the bytes, through a mapping of its own. What is put on a stream runs late, when
// somebody queries, in an order that a seed decides (by every fourth, streams starve); bytes move
// then, and never at the call. What a real driver would punish by corruption, a crash or a leak is
// a violation here, with the call named. In a child that is forked from a process which has used a
// device every call says kNotInitialized.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "gpudirect/driver.h"
#include "tests/gpudirect/kernels/emulation.h"
#include "tests/std.h"

namespace baton::gpudirect {

// The classes of what a real driver punishes by corruption, a crash, a hang or a leak. A
// violation's text ends with the name of its class.

enum class Rule : uint8_t {
  kContext = 1,  // no context current, another device's, one left current, no cuInit
  kLifetime,     // use after free, freed while in use or exported; what is left at the end
  kRange,        // of exports and questions: whole pages, of one allocation, known flags
  kMapping,      // virtual memory management: granularity, order, each thing given back once
  kSharing,      // between processes: handles, rights, and memory that goes while a peer copies
  kCopy,         // outside allocations, pageable, the legacy stream, overlaps, batches' attributes
  kWord,         // waits for words: unable devices, addresses, flags; waits that nobody ends
  kBlocking,     // calls that block for long on a progress thread
  kModule,       // loads while kernels run, kernels that are not loaded, launches of no kernel
  kEntry,        // entries asked for as of another version
  kStale,        // destroyed streams, events, modules; destroyed while something waits for them
  kCapture,  // while a stream is recorded: waits, questions, events; graphs that are gone or left
  kUsers,    // the application's: recordings that others' calls spoil or that get what is not its
};
inline constexpr int kRules = 13;

constexpr const char* name_of(Rule rule) {
  constexpr const char* kNames[] = {"",        "context", "lifetime", "range",    "mapping",
                                    "sharing", "copying", "word",     "blocking", "module",
                                    "entry",   "stale",   "capture",  "user's"};
  return kNames[static_cast<int>(rule)];
}

inline constexpr size_t kMiB = 1 << 20;

// Personalities: what the devices say of themselves.
using Attributes = std::map<DeviceAttribute, int>;
Attributes h100();             // all there is
Attributes without_dma_buf();  // the proprietary kernel module
Attributes without_virtual_memory();
Attributes unordered_writes();  // what adapters write is seen when it has been flushed
Attributes one_copy_engine();   // copies of both directions in one queue
Attributes wsl();               // no dma-buf, no descriptors to hand over

struct FakeOptions {
  uint64_t seed = 1;
  int devices = 1;
  Attributes attributes = h100();
  size_t memory_bytes = 256 << 20;  // of each device
  int version = 13000;
  std::set<std::string, std::less<>> missing = {};  // names that the driver does not have
  Result init = kSuccess;
  bool peer_access = true;  // between devices
  bool ipc_handles = true;  // of memory of cudaMalloc
  bool rdma_access = true;  // false: memory for adapters is made, and then nobody gets access
  size_t window_bytes = SIZE_MAX;  // BAR1: dma-bufs of so many bytes together
  uint64_t fail_call = 0;          // this one of the calls fails, counted from 1; 0: none
  Result fail_with = kOutOfMemory;
};

class FakeDriver {
 public:
  static constexpr size_t kGranularity = 2 << 20;

  explicit FakeDriver(FakeOptions options = {});
  ~FakeDriver();
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  // Of the one fake that there is at a time.
  static GetProcAddress get_proc_address();
  // The table that load_driver() makes of it.
  static Driver driver();

  // ---- memory that somebody else has allocated, in one mapping ----
  DevicePointer allocate(size_t bytes, int device = 0, bool managed = false);
  // In several mappings next to each other, as frameworks' expandable segments.
  DevicePointer allocate_segments(size_t segments, size_t bytes_each);
  void free(DevicePointer pointer);
  // As nvidia-peermem lets adapters find device memory: a descriptor, and where in it. -1: it is
  // none, or not all in one allocation.
  int descriptor_for_adapters(const void* address, size_t bytes, uint64_t* offset);
  // ---- the bytes of device memory, as the device sees them ----
  void write(DevicePointer at, std::string_view bytes);
  std::string read(DevicePointer at, size_t bytes);
  // Where they lie for the test, until they are freed.
  std::byte* view(DevicePointer at, size_t bytes);

  // ---- time ----
  void run(size_t operations);  // that many of what is queued, in the order of the seed
  void run_all();
  size_t queued();
  // What is queued waits for something that nothing queued will bring about.
  bool stuck();
  // The n-th call from here on, counted from 1 (0: none any more), fails once; the next ones of
  // that name do, after so many that do not.
  void fail_call_in(uint64_t n, Result with);
  void fail_next(std::string_view name, Result with, size_t times = 1, size_t after = 0);
  // When the n-th step from here on, counted from 1, begins, or has ended. A step is a call that is
  // no mere question, so that a program makes the same steps each time. `then` calls nothing of the
  // fake; it may kill this process.
  void at_step(uint64_t n, bool ended, std::function<void()> then);
  uint64_t steps();
  // From now on every call fails as on a device that fell off its bus.
  void lose();

  // Called by a flush of remote writes: what adapters have written is seen from then on.
  void on_flush(std::function<void()> land) { land_ = std::move(land); }

  // ---- kernels ----
  // A module of the kernels that the emulation has, for tests of builds that have no image.
  static absl::Span<const std::byte> image();

  // ---- what was seen ----
  uint64_t calls();
  uint64_t calls_of(std::string_view name);
  uint64_t copies();  // asked for on streams, in whichever of the ways, kernels among them
  size_t largest_copy();
  uint64_t copies_with_host();  // that moved to or from pinned memory: what is staged does
  // Each "call: what [class]", the classes being those of rules.h.
  std::vector<std::string> violations();
  // And what is still there that should be gone, whichever thread had it: descriptors and mappings
  // of device memory that nobody gave back among it.
  std::vector<std::string> finish();

  // Whether this thread has a context current; whether a descriptor is one of device memory.
  static bool has_current() { return current_device() >= 0; }
  static bool is_device_memory(int fd);

  // What is put on the default streams (the legacy one, and the one of a thread) is a violation:
  // nothing of ours belongs there. In such a scope, on its thread, the test is the user whose
  // stream it is: his own work, and submit() of transfers that name it.
  class UsersDefaultStreams {
   public:
    UsersDefaultStreams();
    ~UsersDefaultStreams();
    UsersDefaultStreams(const UsersDefaultStreams&) = delete;
    UsersDefaultStreams& operator=(const UsersDefaultStreams&) = delete;
  };

  // A CUDA graph that the application records meanwhile, in the strictest of modes: on this thread,
  // or on another one. What is no work of streams must then be called by threads that have said
  // that it is not concerned, or it fails and spoils the recording: a violation. So is what is put
  // on the stream by others than the user (UsersDefaultStreams).
  class UsersRecording {
   public:
    explicit UsersRecording(FakeDriver& fake, bool on_this_thread = false);
    ~UsersRecording();
    UsersRecording(const UsersRecording&) = delete;
    UsersRecording& operator=(const UsersRecording&) = delete;
    Stream stream() const { return stream_; }
    bool intact() const;

   private:
    FakeDriver& fake_;
    Stream stream_ = nullptr;
  };

  // A context of the application's own, as cuCtxCreate makes them, on no thread. It lives as long
  // as the fake, or until it is destroyed, with its memory and, for whoever asks, its events.
  Context make_context(int device);
  void destroy_context(Context context);
  // A kernel there has failed: whoever asks for what it has made hears so.
  void lose_context(Context context);
  // Of cuMemAlloc in it: no kernel of another context reaches it. To be freed, or destroyed with
  // it.
  DevicePointer allocate_in(Context context, size_t bytes);
  static Context current_context();  // of this thread; null: none

  // In such a scope, on its thread, a stream of another context is the user's, given to us by
  // mistake: where the answer to that is documented it is given, and no violation.
  class ForeignStreams {
   public:
    ForeignStreams();
    ~ForeignStreams();
    ForeignStreams(const ForeignStreams&) = delete;
    ForeignStreams& operator=(const ForeignStreams&) = delete;
    static bool given();
  };

  // On a thread in such a scope, calls that block for long are violations.
  class ProgressThread {
   public:
    ProgressThread();
    ~ProgressThread();
    ProgressThread(const ProgressThread&) = delete;
    ProgressThread& operator=(const ProgressThread&) = delete;
  };

 private:
  friend class FakeCall;
  friend struct FakeCalls;
  friend struct FakeMemoryCalls;
  friend struct FakeIpcCalls;
  friend struct FakeStreamCalls;
  friend struct FakeLaunchCalls;
  friend struct FakeCopyCalls;
  friend struct FakeOrderCalls;
  friend struct FakeGraphCalls;
  friend class FakeMemoryView;

  struct Allocation {
    int fd = -1;
    std::byte* view = nullptr;  // where the fake reaches it
    size_t size = 0;
    int device = 0;
    size_t mappings = 0;
    size_t handles = 1;      // not released yet: it goes with the last of them and its mappings
    bool shareable = false;  // created with a handle type that can be exported
    bool by_handle = false;  // created or imported, so that its handle can be had
    uint64_t file = 0;       // the inode: of an import the same as of what was exported
    bool imported = false;
    bool rdma = false;      // for adapters
    bool exported = false;  // somebody got its descriptor
  };
  struct Mapping {
    size_t size = 0;
    AllocationHandle allocation = 0;
    unsigned long long buffer = 0;
    bool accessible = false;
    bool managed = false;
    bool synchronous = false;  // copies have ended when they return
    Context home = nullptr;    // whose kernels reach it alone; null: of the whole device
  };
  struct KernelFunction {
    Module module = nullptr;
    std::string name;
    kernels::EmulatedKernel kernel;
    bool loaded = false;
    unsigned most_shared = 48 << 10;  // dynamic, without a request
  };
  struct KernelLaunch {
    KernelFunction function;
    uint32_t blocks = 0;
    std::vector<std::byte> arguments;
    Context context = nullptr;
  };
  struct Copy {
    DevicePointer to = 0;
    DevicePointer from = 0;
    size_t bytes = 0;
    std::shared_ptr<const std::string> early = nullptr;  // what was read at the call, if it was
  };
  // A wait for an event or a value: what holds up a stream.
  struct Order {
    enum class Kind : uint8_t { kWaitEvent, kWaitValue } kind;
    Event event = nullptr;
    uint64_t recorded = 0;  // the record of the event that is waited for
    DevicePointer address = 0;
    uint64_t value = 0;
  };
  struct Operation {
    uint64_t number = 0;
    DevicePointer to = 0;
    DevicePointer from = 0;
    size_t bytes = 0;
    Event event = nullptr;                                 // recorded, instead of a copy
    std::shared_ptr<const KernelLaunch> launch = nullptr;  // likewise
    std::vector<Copy> copies = {};                         // likewise: in any order
    std::optional<Order> order = std::nullopt;             // likewise
    GraphExecutable graph = nullptr;                       // whose launch it is of
  };
  struct EventState {
    uint64_t recorded = 0;  // how often it was put on a stream
    uint64_t happened = 0;
    bool in_graph = false;  // the last time on one that was being recorded
  };
  // A stream that is being recorded.
  struct Capture {
    std::thread::id thread;
    bool users = false;  // the application's: of all threads' concern
    bool invalid = false;
    std::deque<Operation> operations;
  };
  using Mappings = std::map<DevicePointer, Mapping>;

  static void forget();  // that there is a fake
  void violate(Rule rule, std::string_view call, const std::string& what);
  bool has(DeviceAttribute attribute) const;
  // The device whose context is current on this thread.
  static int current_device();
  static int device_of(Context context);
  // Where the queue is of a handle that may be one of the default streams', in the current context.
  static Stream real_stream(Stream stream);
  static bool is_default(Stream stream);
  // memory
  AllocationHandle make_allocation(size_t bytes, int device, int imported = -1);
  bool copied_by_peers(const Mapping& mapping) const;
  void drop_if_unused(AllocationHandle handle);
  void map(DevicePointer at, AllocationHandle handle);
  void unmap(Mappings::iterator mapping);
  Mappings::iterator mapping_at(DevicePointer at);
  std::byte* view_of(DevicePointer at, size_t bytes);  // null: not all of it is accessible
  bool pinned(DevicePointer at, size_t bytes) const;
  // Either, for copies and kernels.
  std::byte* reach(DevicePointer at, size_t bytes);
  // For kernels of a context.
  bool reached_from(Context context, DevicePointer at);
  static Context primary(int device);
  bool pending_on(DevicePointer at, size_t bytes) const;
  // What others than the fake have of device memory. Of one allocation; 0: of all.
  size_t foreign_mappings(uint64_t file) const;
  size_t foreign_descriptors() const;
  static bool has_dma_buf(uint64_t file);
  static bool open_elsewhere(const Allocation& allocation);
  void check_exports(std::string_view call, const Allocation& allocation);
  size_t used(int device) const;
  // streams
  bool run_one();
  void execute(const Operation& operation);
  void execute(const KernelLaunch& launch);
  void execute(std::vector<Copy> copies);
  void execute(const Order& order);
  bool may_run(const Operation& operation);
  std::string heads() const;  // what the streams wait for, each the first of its queue
  void look_for_hang(std::string_view call);

  const FakeOptions options_;
  std::atomic<pid_t> used_in_{0};  // the first process that asked for more than cuInit; 0: none
  std::mutex mutex_;
  std::mt19937_64 random_;
  uint64_t calls_ = 0;
  std::map<std::string, uint64_t, std::less<>> calls_by_name_;
  std::vector<std::string> violations_;
  bool lost_ = false;
  uint64_t fail_at_ = 0;  // 0: none
  uint64_t steps_ = 0;
  uint64_t then_at_ = 0;  // 0: no step
  bool then_ended_ = false;
  std::function<void()> then_;
  std::string fail_name_;
  size_t fail_times_ = 0;
  size_t fail_after_ = 0;
  Result fail_with_ = kSuccess;
  bool initialised_ = false;
  std::vector<int> retained_;                // primary contexts, by device
  std::vector<int> current_;                 // on how many threads, by device
  std::set<Context> contexts_;               // the application's own
  std::map<Context, Result> lost_contexts_;  // and what is said of them
  std::map<const void*, Context> homes_;     // of each stream, event and module
  size_t stuck_for_ = 0;                     // questions one after the other, and nothing can run

  std::map<AllocationHandle, Allocation> allocations_;
  std::map<DevicePointer, size_t> reserved_;
  Mappings mappings_;
  std::map<DevicePointer, size_t> pinned_;
  std::map<DevicePointer, size_t> opened_;  // by handles, how often
  AllocationHandle next_handle_ = 1000;
  unsigned long long next_buffer_ = 1;

  std::map<Stream, std::deque<Operation>> streams_;
  std::map<Event, EventState> events_;
  std::map<Stream, Capture> captures_;
  std::map<Graph, std::deque<Operation>> graphs_;
  std::map<GraphExecutable, std::deque<Operation>> executables_;
  std::set<Module> modules_;
  std::map<Function, KernelFunction> functions_;
  uintptr_t next_object_ = 0x1000;
  uint64_t next_operation_ = 0;
  size_t largest_copy_ = 0;
  uint64_t copies_with_host_ = 0;
  std::function<void()> land_;
};

// The prologue of every call: counts it, and says what it answers at once, if anything.
class FakeCall {
 public:
  enum class Needs : uint8_t { kNothing, kDriver, kContext };
  FakeCall(const char* name, Needs needs, bool blocks = false);
  ~FakeCall();
  FakeCall(const FakeCall&) = delete;
  FakeCall& operator=(const FakeCall&) = delete;
  // Not kSuccess: the call answers this and does nothing.
  Result refused() const { return refused_; }
  // The same for a call that takes something away: that is done all the same, and the error told.
  bool takes_away() const { return refused_ == kSuccess || injected_ != kSuccess; }
  Result told() const { return refused_; }
  const char* name() const { return name_; }
  void violate(Rule rule, const std::string& what) const { fake.violate(rule, name_, what); }
  // The queue of a stream that there is, of the current context's device; of one that is being
  // recorded what is recorded. Null: a violation.
  std::deque<FakeDriver::Operation>* queue(Stream stream) const;
  // If this thread records a stream, or the application does on any, and this is no call for that:
  // a violation.
  void look_at_capture();
  // Whether it was made in the current context. Otherwise a violation.
  bool at_home(const void* object) const;
  // What is said of whatever a context has made that is lost, or gone.
  Result loss_of(const void* object) const;
  FakeDriver& fake;

 private:
  std::unique_lock<std::mutex> lock_;
  const char* name_;
  bool then_ = false;  // when it has ended
  Result refused_ = kSuccess;
  Result injected_ = kSuccess;
};

using FakeEntries = std::map<std::string, std::pair<void*, int>, std::less<>>;
void add_fake_calls(FakeEntries& out);
void add_fake_memory_calls(FakeEntries& out);
void add_fake_ipc_calls(FakeEntries& out);
void add_fake_stream_calls(FakeEntries& out);
void add_fake_launch_calls(FakeEntries& out);
void add_fake_copy_calls(FakeEntries& out);
void add_fake_order_calls(FakeEntries& out);
void add_fake_graph_calls(FakeEntries& out);

}  // namespace baton::gpudirect

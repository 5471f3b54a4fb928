// Reads a trace and makes its calls on the fake.
#include "tests/gpudirect/trace/replayer.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

struct Line {
  size_t number = 0;
  int thread = 0;
  std::string name;
  int result = 0;
  std::vector<std::string> arguments;
};

std::optional<uint64_t> number(std::string text) {
  if (text.rfind('>', 0) == 0) text.erase(0, 1);
  uint64_t value = 0;
  if (text.rfind("0x", 0) == 0) {
    if (absl::SimpleHexAtoi(text, &value)) return value;
    return std::nullopt;
  }
  int64_t with_sign = 0;
  if (absl::SimpleAtoi(text, &with_sign)) return static_cast<uint64_t>(with_sign);
  return std::nullopt;
}

// "{1,0,1}"
std::vector<uint64_t> numbers(const std::string& text) {
  std::vector<uint64_t> out;
  if (text.size() < 2) return out;
  const std::vector<std::string> parts = absl::StrSplit(text.substr(1, text.size() - 2), ',');
  for (const std::string& part : parts) out.push_back(number(part).value_or(0));
  return out;
}

// Stands for a thread of the recorded process: what is current to it stays so. Works while whoever
// gives it something waits.
class Stand {
 public:
  Stand() : thread_([this] { work(); }) {}
  ~Stand() {
    run(nullptr);
    thread_.join();
  }
  Stand(const Stand&) = delete;
  Stand& operator=(const Stand&) = delete;

  // Nothing to do: it ends.
  void run(std::function<void()> what) {
    std::unique_lock lock(mutex_);
    what_ = std::move(what);
    given_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !given_; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (bool on = true; on;) {
      changed_.wait(lock, [&] { return given_; });
      on = what_ != nullptr;
      if (on) what_();
      given_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> what_;
  bool given_ = false;
  std::thread thread_;
};

// A word that the trace does not explain: the line is left out.
struct Unknown {};

class Player {
 public:
  Player(FakeOptions options, const std::vector<Line>& lines)
      : fake_(std::move(options)), driver_(FakeDriver::driver()), lines_(lines) {}
  ~Player() {
    for (const auto& [recorded, range] : host_) munmap(range.first, range.second);
    for (const auto& [recorded, fd] : descriptors_) close(fd);
    for (auto& [number, stand] : stands_) {
      stand.run([&] {
        Context context = nullptr;
        while (FakeDriver::has_current()) driver_.cuCtxPopCurrent(&context);
      });
    }
  }

  Replay play() {
    for (const Line& line : lines_) {
      stands_[line.thread].run([&] { one(line); });
    }
    return std::move(out_);
  }

 private:
  using Kind = Replay::Difference::Kind;

  void one(const Line& line) {
    const size_t before = fake_.violations().size();
    line_ = &line;
    Result result = kSuccess;
    try {
      const std::optional<Result> made = make();
      if (!made.has_value()) {
        ++out_.left_out;
        return;
      }
      result = *made;
    } catch (const Unknown&) {
      ++out_.left_out;
      return;
    }
    ++out_.calls;
    const auto violations = fake_.violations();
    for (size_t i = before; i < violations.size(); ++i) {
      // What an error was answered to may break a rule; what worked may not.
      if (line.result == kSuccess) differ(Kind::kStricter, violations[i]);
    }
    // Whether something has ended yet is nobody's mistake.
    const auto plain = [](int one) { return one == kNotReady ? int{kSuccess} : one; };
    if (plain(result) == plain(line.result)) return;
    differ(plain(line.result) == kSuccess ? Kind::kStricter
           : plain(result) == kSuccess    ? Kind::kLooser
                                          : Kind::kOther,
           absl::StrFormat("the driver answered %d, the fake %d", line.result,
                           static_cast<int>(result)));
  }
  void differ(Kind kind, const std::string& what) {
    out_.differences.push_back({kind, line_->number, absl::StrCat(line_->name, ": ", what)});
  }
  void compare(const char* what, uint64_t recorded, uint64_t replayed) {
    if (line_->result != kSuccess || recorded == replayed) return;
    differ(Kind::kOther, absl::StrFormat("%s is %u with the driver and %u with the fake", what,
                                         recorded, replayed));
  }

  // ---- what the recorded process's words mean here ----
  const std::string& word(size_t at) const {
    if (at >= line_->arguments.size()) throw Unknown{};
    return line_->arguments[at];
  }
  uint64_t value(size_t at) const {
    const auto found = number(word(at));
    if (!found) throw Unknown{};
    return *found;
  }
  // An address of a device's memory, or of the host's that was registered.
  DevicePointer address(uint64_t recorded) const {
    if (recorded == 0) return 0;
    for (const auto& [from, range] : device_) {
      if (recorded >= from && recorded - from < range.second) return range.first + recorded - from;
    }
    for (const auto& [from, range] : host_) {
      if (recorded >= from && recorded - from < range.second) {
        return reinterpret_cast<uintptr_t>(range.first) + recorded - from;
      }
    }
    throw Unknown{};
  }
  template <typename Handle>
  Handle object(size_t at) const {
    const uint64_t recorded = value(at);
    if (recorded == 0) return nullptr;
    const auto found = objects_.find(recorded);
    if (found == objects_.end()) throw Unknown{};
    return reinterpret_cast<Handle>(found->second);
  }
  template <typename Handle>
  void learn(size_t at, Handle handle) {
    const auto recorded = number(word(at));
    if (recorded) objects_[*recorded] = reinterpret_cast<uintptr_t>(handle);
  }
  AllocationHandle allocation(size_t at) const {
    const auto found = allocations_.find(value(at));
    if (found == allocations_.end()) throw Unknown{};
    return found->second;
  }
  bool worked() const { return line_->result == kSuccess; }

  // The call of this line; nothing where it is not replayed.
  std::optional<Result> make() {
    const std::string& name = line_->name;
    if (name == "cuInit") return driver_.cuInit(static_cast<unsigned>(value(0)));
    if (name == "cuDriverGetVersion") {
      int version = 0;
      return driver_.cuDriverGetVersion(&version);
    }
    if (absl::StartsWith(name, "cuDevice")) return device_call();
    if (absl::StartsWith(name, "cuCtx")) {
      Context context = nullptr;
      if (name == "cuCtxPushCurrent") return driver_.cuCtxPushCurrent(object<Context>(0));
      return driver_.cuCtxPopCurrent(&context);
    }
    if (absl::StartsWith(name, "cuMemcpy")) return copy_call();
    if (absl::StartsWith(name, "cuPointer")) return pointer_call();
    if (absl::StartsWith(name, "cuIpc")) return ipc_call();
    if (absl::StartsWith(name, "cuMem")) return memory_call();
    if (absl::StartsWith(name, "cuStream") || absl::StartsWith(name, "cuEvent")) {
      return order_call();
    }
    if (name == "cuModuleLoadData") {
      Module module = nullptr;
      const Result result = driver_.cuModuleLoadData(&module, FakeDriver::image().data());
      if (worked() && result == kSuccess) learn(0, module);
      return result;
    }
    if (name == "cuModuleUnload") return driver_.cuModuleUnload(object<Module>(0));
    if (name == "cuThreadExchangeStreamCaptureMode") {
      int mode = kCaptureRelaxed;  // which one it was is not recorded
      return driver_.cuThreadExchangeStreamCaptureMode(&mode);
    }
    return std::nullopt;  // functions and launches: their names and arguments are not recorded
  }

  Result device_call() {
    const std::string& name = line_->name;
    int small = 0;
    size_t bytes = 0;
    char words[128] = {};
    const auto device = [&](size_t at) { return static_cast<int>(value(at)); };
    if (name == "cuDeviceGetCount") return driver_.cuDeviceGetCount(&small);
    if (name == "cuDeviceGet") return driver_.cuDeviceGet(&small, device(1));
    if (name == "cuDeviceGetName") return driver_.cuDeviceGetName(words, sizeof words, device(2));
    if (name == "cuDeviceGetPCIBusId") {
      return driver_.cuDeviceGetPCIBusId(words, sizeof words, device(2));
    }
    if (name == "cuDeviceTotalMem") return driver_.cuDeviceTotalMem(&bytes, device(1));
    if (name == "cuDeviceGetUuid") {
      DeviceUuid uuid;
      return driver_.cuDeviceGetUuid(&uuid, device(1));
    }
    if (name == "cuDeviceGetAttribute") {
      return driver_.cuDeviceGetAttribute(&small, static_cast<DeviceAttribute>(value(1)),
                                          device(2));
    }
    if (name == "cuDeviceCanAccessPeer") {
      return driver_.cuDeviceCanAccessPeer(&small, device(1), device(2));
    }
    if (name == "cuDevicePrimaryCtxRelease") return driver_.cuDevicePrimaryCtxRelease(device(0));
    if (name == "cuDevicePrimaryCtxRetain") {
      Context context = nullptr;
      const Result result = driver_.cuDevicePrimaryCtxRetain(&context, device(1));
      if (worked() && result == kSuccess) learn(0, context);
      return result;
    }
    throw Unknown{};
  }

  std::optional<Result> copy_call() {
    if (line_->name == "cuMemcpyAsync") {
      return driver_.cuMemcpyAsync(address(value(0)), address(value(1)), value(2),
                                   object<Stream>(3));
    }
    if (line_->name == "cuMemcpy3DBatchAsync") return boxes_call();
    if (line_->name != "cuMemcpy2DAsync") return std::nullopt;  // lists are not recorded
    const std::vector<uint64_t> plane = numbers(word(0));
    if (plane.size() != 6) throw Unknown{};
    PlaneCopy copy;
    copy.from.device = address(plane[0]);
    copy.from.pitch = plane[1];
    copy.to.device = address(plane[2]);
    copy.to.pitch = plane[3];
    copy.width = plane[4];
    copy.height = plane[5];
    return driver_.cuMemcpy2DAsync(&copy, object<Stream>(1));
  }

  std::optional<Result> boxes_call() {
    constexpr size_t kBefore = 3;  // words before the boxes
    if (line_->arguments.size() - kBefore != value(0)) return std::nullopt;  // of many some
    std::vector<BoxCopy> boxes(value(0));
    for (size_t i = 0; i < boxes.size(); ++i) {
      const std::vector<uint64_t> said = numbers(word(kBefore + i));
      if (said.size() != 9) throw Unknown{};
      BoxCopy& box = boxes[i];
      box.from = {.at = address(said[0]), .pitch = said[1], .height = said[2]};
      box.to = {.at = address(said[3]), .pitch = said[4], .height = said[5]};
      box.width = said[6];
      box.height = said[7];
      box.depth = said[8];
    }
    return driver_.cuMemcpy3DBatchAsync(boxes.size(), boxes.data(), value(1), object<Stream>(2));
  }

  Result pointer_call() {
    if (line_->name == "cuPointerSetAttribute") {
      const unsigned on = 1;
      return driver_.cuPointerSetAttribute(&on, static_cast<PointerAttribute>(value(1)),
                                           address(value(2)));
    }
    std::vector<PointerAttribute> attributes;
    std::vector<uint64_t> said;
    for (size_t i = 1; i < line_->arguments.size(); ++i) {
      const std::vector<std::string> pair = absl::StrSplit(line_->arguments[i], '=');
      attributes.push_back(static_cast<PointerAttribute>(number(pair[0]).value_or(0)));
      said.push_back(pair.size() > 1 ? number(pair[1]).value_or(0) : 0);
    }
    std::vector<uint64_t> values(attributes.size());
    std::vector<void*> places;
    for (uint64_t& each : values) places.push_back(&each);
    const Result result =
        driver_.cuPointerGetAttributes(static_cast<unsigned>(attributes.size()), attributes.data(),
                                       places.data(), address(value(0)));
    for (size_t i = 0; i < attributes.size() && result == kSuccess; ++i) {
      if (attributes[i] == kPointerMemoryType) compare("the kind of memory", said[i], values[i]);
      if (attributes[i] == kPointerIsManaged) compare("managed", said[i], values[i] & 0xff);
      if (attributes[i] == kPointerMappingSize) compare("the mapping's size", said[i], values[i]);
      if (attributes[i] == kPointerHasIpcHandle) compare("a handle", said[i], values[i]);
    }
    return result;
  }

  std::optional<Result> ipc_call() {
    if (line_->name == "cuIpcGetMemHandle") {
      IpcHandle handle;
      return driver_.cuIpcGetMemHandle(&handle, address(value(1)));
    }
    return std::nullopt;  // of another process's memory
  }

  Result memory_call() {
    const std::string& name = line_->name;
    if (name == "cuMemGetAllocationGranularity") {
      size_t bytes = 0;
      const AllocationProperties properties = properties_of(1);
      const Result result =
          driver_.cuMemGetAllocationGranularity(&bytes, &properties, static_cast<int>(value(2)));
      if (result == kSuccess && worked()) compare("the granularity", value(0), bytes);
      return result;
    }
    if (name == "cuMemCreate") {
      AllocationHandle handle = 0;
      const AllocationProperties properties = properties_of(2);
      const Result result = driver_.cuMemCreate(&handle, value(1), &properties, value(3));
      if (worked() && result == kSuccess) allocations_[value(0)] = handle;
      return result;
    }
    if (name == "cuMemRelease") return driver_.cuMemRelease(allocation(0));
    if (name == "cuMemAddressReserve") {
      DevicePointer at = 0;
      const Result result = driver_.cuMemAddressReserve(&at, value(1), value(2), 0, value(4));
      if (worked() && result == kSuccess) device_[value(0)] = {at, value(1)};
      return result;
    }
    if (name == "cuMemAddressFree") {
      const Result result = driver_.cuMemAddressFree(address(value(0)), value(1));
      if (result == kSuccess) device_.erase(value(0));
      return result;
    }
    if (name == "cuMemMap") {
      return driver_.cuMemMap(address(value(0)), value(1), value(2), allocation(3), value(4));
    }
    if (name == "cuMemUnmap") return driver_.cuMemUnmap(address(value(0)), value(1));
    if (name == "cuMemSetAccess") {
      const std::vector<uint64_t> one = numbers(word(2));
      if (one.size() != 2) throw Unknown{};
      const AccessDescription access{.location = {.id = static_cast<int>(one[0])},
                                     .flags = static_cast<int>(one[1])};
      return driver_.cuMemSetAccess(address(value(0)), value(1), &access, value(3) > 0 ? 1 : 0);
    }
    if (name == "cuMemRetainAllocationHandle") {
      AllocationHandle handle = 0;
      const Result result =
          driver_.cuMemRetainAllocationHandle(&handle, pointer_of<void>(address(value(1))));
      if (worked() && result == kSuccess) allocations_[value(0)] = handle;
      return result;
    }
    if (name == "cuMemExportToShareableHandle" || name == "cuMemGetHandleForAddressRange") {
      int fd = -1;
      const bool range = name == "cuMemGetHandleForAddressRange";
      const Result result =
          range ? driver_.cuMemGetHandleForAddressRange(&fd, address(value(1)), value(2),
                                                        static_cast<int>(value(3)), value(4))
                : driver_.cuMemExportToShareableHandle(&fd, allocation(1),
                                                       static_cast<int>(value(2)), value(3));
      if (fd < 0) return result;
      // A dma-buf would be seen as an adapter's; nobody registers it here.
      if (range || !worked()) {
        close(fd);
      } else {
        const auto old = descriptors_.find(value(0));
        if (old != descriptors_.end()) close(old->second);
        descriptors_[value(0)] = fd;
        last_exported_ = fd;
      }
      return result;
    }
    if (name == "cuMemImportFromShareableHandle") {
      // What came over a socket has another number there; it is taken for the last one that was
      // sent.
      const auto known = descriptors_.find(value(1));
      const int fd = known == descriptors_.end() ? last_exported_ : known->second;
      if (fd < 0) throw Unknown{};
      AllocationHandle handle = 0;
      const Result result = driver_.cuMemImportFromShareableHandle(
          &handle, pointer_of<void>(static_cast<DevicePointer>(fd)), static_cast<int>(value(2)));
      if (worked() && result == kSuccess) allocations_[value(0)] = handle;
      return result;
    }
    if (name == "cuMemGetAddressRange") {
      DevicePointer base = 0;
      size_t bytes = 0;
      const Result result = driver_.cuMemGetAddressRange(&base, &bytes, address(value(2)));
      if (result == kSuccess && worked()) compare("the allocation's size", value(1), bytes);
      return result;
    }
    if (name == "cuMemHostRegister") {
      const size_t bytes = value(1);
      const auto known = host_.find(value(0));
      void* at = known != host_.end() ? known->second.first : nullptr;
      if (at == nullptr) {
        at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw Unknown{};
        host_[value(0)] = {at, bytes};
      }
      return driver_.cuMemHostRegister(at, bytes, static_cast<unsigned>(value(2)));
    }
    if (name == "cuMemHostUnregister") {
      const auto known = host_.find(value(0));
      if (known == host_.end()) throw Unknown{};
      const Result result = driver_.cuMemHostUnregister(known->second.first);
      // Its addresses may be other memory's next.
      if (worked() && result == kSuccess) {
        munmap(known->second.first, known->second.second);
        host_.erase(known);
      }
      return result;
    }
    throw Unknown{};
  }

  std::optional<Result> order_call() {
    const std::string& name = line_->name;
    if (name == "cuStreamCreateWithPriority") {
      Stream stream = nullptr;
      const Result result = driver_.cuStreamCreateWithPriority(
          &stream, static_cast<unsigned>(value(1)), static_cast<int>(value(2)));
      if (worked() && result == kSuccess) learn(0, stream);
      return result;
    }
    if (name == "cuEventCreate") {
      Event event = nullptr;
      const Result result = driver_.cuEventCreate(&event, static_cast<unsigned>(value(1)));
      if (worked() && result == kSuccess) learn(0, event);
      return result;
    }
    if (name == "cuStreamDestroy") return driver_.cuStreamDestroy(object<Stream>(0));
    if (name == "cuEventDestroy") return driver_.cuEventDestroy(object<Event>(0));
    if (name == "cuEventRecord") {
      return driver_.cuEventRecord(object<Event>(0), object<Stream>(1));
    }
    if (name == "cuStreamWaitEvent") {
      return driver_.cuStreamWaitEvent(object<Stream>(0), object<Event>(1),
                                       static_cast<unsigned>(value(2)));
    }
    if (name == "cuStreamIsCapturing") return std::nullopt;  // graphs are not replayed
    // What had ended with the driver ends here before it is asked.
    if (worked()) fake_.run_all();
    if (name == "cuStreamQuery") return driver_.cuStreamQuery(object<Stream>(0));
    if (name == "cuEventQuery") return driver_.cuEventQuery(object<Event>(0));
    return std::nullopt;  // waits for words: what the host writes there is not recorded
  }

  AllocationProperties properties_of(size_t at) const {
    const std::vector<uint64_t> said = numbers(word(at));
    if (said.size() != 3) throw Unknown{};
    AllocationProperties properties;
    properties.requested_handle_types = static_cast<int>(said[0]);
    properties.location.id = static_cast<int>(said[1]);
    properties.flags.rdma_capable = static_cast<unsigned char>(said[2]);
    return properties;
  }

  FakeDriver fake_;
  const Driver driver_;
  std::map<int, Stand> stands_;
  const std::vector<Line>& lines_;
  const Line* line_ = nullptr;
  Replay out_;
  std::map<uint64_t, uintptr_t> objects_;
  std::map<uint64_t, AllocationHandle> allocations_;
  std::map<uint64_t, std::pair<DevicePointer, size_t>> device_;
  std::map<uint64_t, std::pair<void*, size_t>> host_;
  std::map<uint64_t, int> descriptors_;
  int last_exported_ = -1;
};

// The fake is what the recorded driver said of itself.
FakeOptions personality(const std::vector<Line>& lines, int version) {
  FakeOptions options;
  options.version = version;
  options.attributes.clear();
  for (const Line& line : lines) {
    if (line.result != kSuccess) continue;
    const auto said = [&](size_t at) {
      return at < line.arguments.size() ? number(line.arguments[at]).value_or(0) : 0;
    };
    if (line.name == "cuDeviceGetCount") options.devices = static_cast<int>(said(0));
    if (line.name == "cuDeviceTotalMem") options.memory_bytes = said(0);
    if (line.name == "cuDeviceGetAttribute") {
      options.attributes[static_cast<DeviceAttribute>(said(1))] = static_cast<int>(said(0));
    }
  }
  return options;
}

}  // namespace

std::string Replay::text(const std::string& name) const {
  std::string out;
  for (const Difference& each : differences) {
    constexpr const char* kKinds[] = {"stricter", "looser", "different"};
    absl::StrAppend(&out, name, ":", each.line, ": ", each.what, " (the fake is ",
                    kKinds[static_cast<int>(each.kind)], ")\n");
  }
  absl::StrAppend(&out, calls, " calls replayed, ", left_out, " left out, ", differences.size(),
                  " differences\n");
  return out;
}

absl::StatusOr<Replay> replay(const std::string& file) {
  std::ifstream in(file);
  std::string text;
  int version = 0;
  if (!std::getline(in, text)) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": there is no trace"));
  }
  const std::vector<std::string> head = absl::StrSplit(text, ' ');
  if (head.size() != 3 || head[0] != "baton-gpu-trace" || head[1] != "2" ||
      !absl::SimpleAtoi(head[2], &version)) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": no trace of this version"));
  }
  std::vector<Line> lines;
  for (size_t row = 2; std::getline(in, text); ++row) {
    const std::vector<std::string> words = absl::StrSplit(text, ' ');
    Line line{.number = row, .name = words.size() < 3 ? "" : words[1]};
    if (words.size() < 3 || !absl::SimpleAtoi(words[0], &line.thread) ||
        !absl::SimpleAtoi(words[2], &line.result)) {
      return absl::InvalidArgumentError(absl::StrCat(file, ":", row, ": no call: ", text));
    }
    line.arguments.assign(words.begin() + 3, words.end());
    lines.push_back(std::move(line));
  }
  return Player(personality(lines, version), lines).play();
}

}  // namespace baton::gpudirect

// Tables of calls with one mistake in them: what each mistake does, and where it can be made.
#include "tests/gpudirect/mutants/mutator.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

Mutator* the_mutator = nullptr;
std::map<std::pair<std::string, Mistake>, int> counts;
std::vector<Stream> streams;
std::function<void()> postponed;

// Questions change nothing: leaving one out, or asking twice, is no mistake by itself. These ask
// for no context.
const std::set<std::string> kQuestionsOfDevices = {"cuDriverGetVersion",
                                                   "cuGetErrorName",
                                                   "cuGetErrorString",
                                                   "cuDeviceGetCount",
                                                   "cuDeviceGet",
                                                   "cuDeviceGetName",
                                                   "cuDeviceGetAttribute",
                                                   "cuDeviceTotalMem",
                                                   "cuDeviceGetPCIBusId",
                                                   "cuDeviceGetUuid",
                                                   "cuPointerGetAttributes",
                                                   "cuMemGetAllocationGranularity",
                                                   "cuDeviceCanAccessPeer",
                                                   "cuStreamIsCapturing"};
// Of these one asks how many blocks fit: any answer does, for no kernel counts on blocks that run
// at once.
const std::set<std::string> kQuestions = {"cuEventQuery", "cuStreamQuery",
                                          "cuOccupancyMaxActiveBlocksPerMultiprocessor"};
// What is done for each kernel before it is launched.
const std::set<std::string> kOfKernels = {"cuModuleGetFunction", "cuFuncLoad",
                                          "cuFuncSetAttribute"};
// These ask for no context either.
const std::set<std::string> kWithoutAContext = {"cuInit",
                                                "cuDevicePrimaryCtxRetain",
                                                "cuDevicePrimaryCtxRelease",
                                                "cuCtxPushCurrent",
                                                "cuCtxPopCurrent",
                                                "cuMemCreate",
                                                "cuMemRelease",
                                                "cuMemAddressReserve",
                                                "cuMemAddressFree",
                                                "cuMemMap",
                                                "cuMemUnmap",
                                                "cuMemSetAccess",
                                                "cuMemRetainAllocationHandle",
                                                "cuMemExportToShareableHandle",
                                                "cuMemImportFromShareableHandle"};
// The same once more does what was done: these are no mistakes either.
const std::set<std::string> kIdempotent = {"cuInit",
                                           "cuMemSetAccess",
                                           "cuFuncLoad",
                                           "cuFuncSetAttribute",
                                           "cuFlushGPUDirectRDMAWrites",
                                           "cuStreamWaitEvent",
                                           "cuStreamWaitValue64",
                                           "cuEventRecord",
                                           "cuMemcpyAsync",
                                           "cuMemcpy2DAsync",
                                           "cuMemcpyBatchAsync",
                                           "cuLaunchKernel"};

// A value that the call takes, and not where it leaves an answer or reads a list.
template <typename T>
constexpr bool kPlain =
    !std::is_pointer_v<T> || std::is_same_v<T, Stream> || std::is_same_v<T, Event> ||
    std::is_same_v<T, Context> || std::is_same_v<T, Module> || std::is_same_v<T, Function> ||
    std::is_same_v<T, void*>;

}  // namespace

const char* name_of(Mistake mistake) {
  constexpr const char* kNames[kMistakes] = {"left out",
                                             "twice",
                                             "late",
                                             "too small",
                                             "other flags",
                                             "on the legacy stream",
                                             "on another stream",
                                             "without a context",
                                             "not waited for"};
  return kNames[static_cast<int>(mistake)];
}

std::string Mutant::text() const {
  return absl::StrCat(call, " ", name_of(mistake), " (", occurrence, ")");
}

template <auto Entry>
struct Mutated;
template <typename... Args, Result (*Driver::*Entry)(Args...)>
struct Mutated<Entry> {
  static inline const char* name = nullptr;

  static bool chance(Mistake mistake) {
    const int seen = ++counts[{name, mistake}];
    const Mutant& mutant = the_mutator->mutant_;
    if (the_mutator->made_ || mutant.call != name || mutant.mistake != mistake ||
        mutant.occurrence != seen) {
      return false;
    }
    the_mutator->made_ = true;
    return true;
  }
  // The first of that type, or the last.
  template <typename T, bool kLast = false, typename Change>
  static Result changed(std::tuple<Args...> args, const Change& change) {
    constexpr int kCount = (int{std::is_same_v<Args, T>} + ...);
    int which = 0;
    std::apply(
        [&](auto&... arg) {
          const auto one = [&](auto& value) {
            if constexpr (std::is_same_v<std::decay_t<decltype(value)>, T>) {
              if (which++ == (kLast ? kCount - 1 : 0)) value = change(value);
            }
          };
          (one(arg), ...);
        },
        args);
    return std::apply(the_mutator->below_.*Entry, args);
  }

  static Result call(Args... args) {
    const auto make = [=] { return (the_mutator->below_.*Entry)(args...); };
    std::function<void()> before = std::exchange(postponed, nullptr);
    const Result result = mutated(make, args...);
    if (before) before();
    return result;
  }

  template <typename Make>
  static Result mutated(const Make& make, Args... args) {
    constexpr bool kValues = (kPlain<Args> && ...);
    const bool of_device = kQuestionsOfDevices.contains(name);
    const bool question = of_device || kQuestions.contains(name);
    if (!of_device && !kWithoutAContext.contains(name) && chance(Mistake::kWithoutContext)) {
      std::vector<Context> contexts;
      while (FakeDriver::has_current()) {
        the_mutator->below_.cuCtxPopCurrent(&contexts.emplace_back());
      }
      const Result result = make();
      for (auto at = contexts.rbegin(); at != contexts.rend(); ++at) {
        the_mutator->below_.cuCtxPushCurrent(*at);
      }
      return result;
    }
    if (question) {
      const Result result = make();
      return result == kNotReady && chance(Mistake::kHastily) ? kSuccess : result;
    }
    // Taken to have worked, a call that answers more than a result leaves nothing to go on with.
    if (kValues || std::string_view(name).starts_with("cuMemcpy") ||
        std::string_view(name) == "cuMemSetAccess" || std::string_view(name) == "cuLaunchKernel" ||
        std::string_view(name) == "cuCtxPopCurrent") {
      if (chance(Mistake::kLeftOut)) return kSuccess;
    }
    if (!kIdempotent.contains(name) && chance(Mistake::kTwice)) {
      make();
      return make();
    }
    if constexpr (kValues && (std::is_same_v<Args, Stream> || ...)) {
      if (std::string_view(name) != "cuStreamDestroy" && chance(Mistake::kLate)) {
        postponed = [make] { make(); };
        return kSuccess;
      }
    }
    if constexpr ((std::is_same_v<Args, size_t> || ...)) {
      if (chance(Mistake::kTooSmall)) {
        return changed<size_t>({args...}, [](size_t value) { return value / 2; });
      }
    }
    if constexpr ((std::is_same_v<Args, unsigned> || ...)) {
      if (chance(Mistake::kOtherFlags)) {  // the last: of a launch the shared memory
        return changed<unsigned, true>({args...}, [](unsigned value) { return value ^ 0x40u; });
      }
    }
    if constexpr ((std::is_same_v<Args, Stream> || ...)) {
      if (chance(Mistake::kOnLegacyStream)) {
        return changed<Stream>({args...}, [](Stream) { return nullptr; });
      }
      if (streams.size() > 1 && chance(Mistake::kOtherStream)) {
        return changed<Stream>(
            {args...}, [](Stream right) { return streams[0] == right ? streams[1] : streams[0]; });
      }
    }
    const Result result = make();
    if constexpr (std::is_same_v<std::tuple<Args...>, std::tuple<Stream*, unsigned, int>>) {
      std::apply([](Stream* stream, auto...) { streams.push_back(*stream); }, std::tuple(args...));
    }
    return result;
  }
};

Mutator::Mutator(const Driver& below, Mutant mutant)
    : below_(below), mutant_(std::move(mutant)), table_(below) {
  the_mutator = this;
  counts.clear();
  streams.clear();
#define BATON_MUTATE(entry, version, parameters)  \
  if (below.entry != nullptr) {                   \
    Mutated<& Driver::entry>::name = #entry;      \
    table_.entry = Mutated<&Driver::entry>::call; \
  }
  BATON_DRIVER_ENTRIES(BATON_MUTATE)
  BATON_DRIVER_OPTIONAL(BATON_MUTATE)
#undef BATON_MUTATE
  // Stands around all others and changes nothing but the thread: what comes after it is not late.
  table_.cuThreadExchangeStreamCaptureMode = below.cuThreadExchangeStreamCaptureMode;
}

Mutator::~Mutator() {
  if (postponed) std::exchange(postponed, nullptr)();
  the_mutator = nullptr;
}

std::vector<Chance> Mutator::chances() const {
  // Kernels that nobody launches may be there twice, or half.
  const bool launches = counts.contains({"cuLaunchKernel", Mistake::kWithoutContext});
  std::vector<Chance> out;
  for (const auto& [what, times] : counts) {
    const auto& [call, mistake] = what;
    const bool idle = !launches && kOfKernels.contains(call);
    if (idle && (mistake == Mistake::kLeftOut || mistake == Mistake::kTwice)) continue;
    out.push_back({call, mistake, times});
  }
  return out;
}

}  // namespace baton::gpudirect

// Reading the programs of all ranks for the simulator.
#include "collectives/proof/simulate_programs.h"

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"

namespace baton::collectives::proof {

using schedules::Step;

namespace {

bool moves(Step::Kind kind) {
  return kind == Step::Kind::kSend || kind == Step::Kind::kReceive ||
         kind == Step::Kind::kReceiveReduce;
}

// Numbers the pairs of ranks in the order in which they are met.
class PairNumbers {
 public:
  explicit PairNumbers(std::vector<SimulatedPair>& pairs) : pairs_(pairs) {}

  uint32_t find(uint32_t source, uint32_t target) {
    const uint64_t key = uint64_t{source} << 32 | target;
    Recent& recent = recent_[key % kRecent];
    if (recent.key != key) {
      const auto [at, fresh] = numbers_.try_emplace(key, static_cast<uint32_t>(pairs_.size()));
      if (fresh) pairs_.push_back({source, target});
      recent = {key, at->second};
    }
    return recent.number;
  }

 private:
  // Most steps talk to the peers of the step before.
  static constexpr size_t kRecent = 64;
  struct Recent {
    uint64_t key = UINT64_MAX;
    uint32_t number = 0;
  };
  std::vector<SimulatedPair>& pairs_;
  absl::flat_hash_map<uint64_t, uint32_t> numbers_;
  Recent recent_[kRecent];
};

}  // namespace

SimulatedPrograms::Cut SimulatedPrograms::cut(size_t bytes, size_t piece_bytes) const {
  auto divide_up = [](size_t a, size_t b) { return a / b + (a % b != 0 ? 1 : 0); };
  Cut cut;
  cut.bytes = blocks ? divide_up(bytes, parts) : bytes;
  cut.part_bytes = std::max<size_t>(1, divide_up(std::min(bytes, piece_bytes), parts));
  const size_t piece = blocks ? cut.part_bytes : cut.part_bytes * parts;
  cut.pieces = std::max<size_t>(1, divide_up(cut.bytes, piece));
  return cut;
}

absl::StatusOr<SimulatedPrograms> read_programs(const schedules::ScheduleSpec& spec,
                                                const ProgramSource& program, uint32_t channels) {
  SimulatedPrograms out;
  out.ranks = spec.ranks;
  out.channels = channels;
  out.parts = std::max(1u, schedules::parts_of(spec));
  out.blocks = spec.collective == Collective::kReduceScatter ||
               spec.collective == Collective::kAllGather ||
               spec.collective == Collective::kAllToAll || spec.collective == Collective::kGather ||
               spec.collective == Collective::kScatter;
  out.starts.reserve(size_t{spec.ranks} * channels + 1);
  PairNumbers numbers(out.pairs);
  for (uint32_t rank = 0; rank < spec.ranks; ++rank) {
    for (uint32_t channel = 0; channel < channels; ++channel) {
      absl::StatusOr<schedules::Program> written = program(rank, channel);
      if (!written.ok()) return written.status();
      out.starts.push_back(out.steps.size());
      if (rank == 0 && channel == 0) out.steps.reserve(written->steps.size() * spec.ranks);
      for (const Step& step : written->steps) {
        const bool message = moves(step.kind);
        const schedules::Place& place = step.kind == Step::Kind::kSend ? step.source : step.target;
        const bool scratch = place.buffer == schedules::BufferName::kScratch;
        if ((message && (step.peer >= spec.ranks || step.peer == rank)) ||
            (!scratch && (place.part > out.parts || step.parts > out.parts - place.part)) ||
            out.parts >= SimulatedStep::kScratchPart) {
          return absl::InvalidArgumentError(absl::StrFormat(
              "step %d of rank %u on channel %u names peer %u and parts [%u, %u), but there are %u "
              "ranks and %u parts",
              &step - written->steps.data(), rank, channel, step.peer, place.part,
              place.part + step.parts, spec.ranks, out.parts));
        }
        SimulatedStep& read = out.steps.emplace_back();
        read.kind = static_cast<uint32_t>(step.kind);
        read.part = scratch ? SimulatedStep::kScratchPart : place.part;
        read.parts = step.kind == Step::Kind::kFold ? spec.ranks - 1 : step.parts;
        if (message) {
          const bool sends = step.kind == Step::Kind::kSend;
          read.pair = numbers.find(sends ? rank : step.peer, sends ? step.peer : rank);
        }
      }
    }
  }
  out.starts.push_back(out.steps.size());
  return out;
}

}  // namespace baton::collectives::proof

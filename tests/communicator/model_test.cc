// Calls of all kinds against a model of each: every algorithm, and random calls among forked ranks,
// whatever the type, operation, root, counts, layout, memory and number of calls in flight.
// BATON_SEED=n repeats one.
#include <cstring>
#include <numeric>
#include <random>

#include "absl/strings/str_join.h"
#include "collectives/launch.h"
#include "collectives/schedules/schedule.h"
#include "tests/communicator/group.h"
#include "tests/reduce/reference.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"

namespace baton::model_test {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr std::byte kUntouched{0xA5};

enum class Kind {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kReduceScatterV,
  kAllGather,
  kAllGatherV,
  kScatter,
  kGather,
  kBroadcast,
  kAllToAll,
  kAllToAllV,
};
constexpr std::array kKinds = {"all_reduce", "reduce",       "reduce_scatter", "reduce_scatter_v",
                               "all_gather", "all_gather_v", "scatter",        "gather",
                               "broadcast",  "all_to_all",   "all_to_all_v"};

// What all ranks know of a call; each draws it from the same numbers.
struct Case {
  Kind kind{};
  DataType type{};
  ReduceOp op{};
  int root = 0;
  uint64_t seed = 0;  // of the inputs
  bool in_place = false, ours = false;
  CallOptions options;
  std::vector<size_t> counts;               // of the ranks' blocks
  std::vector<std::vector<size_t>> starts;  // of them in each rank's larger buffer
  std::vector<size_t> sizes;                // of that, in elements

  size_t element() const { return size_of(type); }
  bool reduces() const { return kind <= Kind::kReduceScatterV; }
  bool exchanges() const { return kind == Kind::kAllToAll || kind == Kind::kAllToAllV; }
  // Whether the input, or the output, has a block for each rank.
  bool gives_blocks() const {
    return kind == Kind::kReduceScatter || kind == Kind::kReduceScatterV ||
           kind == Kind::kScatter || exchanges();
  }
  bool gets_blocks() const {
    return kind == Kind::kAllGather || kind == Kind::kAllGatherV || kind == Kind::kGather ||
           exchanges();
  }
  std::string describe() const {
    return absl::StrFormat("%s of %s (%s), root %d, counts [%s]%s%s, ordered %d",
                           kKinds[static_cast<size_t>(kind)], std::string(name_of(type)),
                           std::string(name_of(op)), root, absl::StrJoin(counts, " "),
                           in_place ? ", in place" : "", ours ? ", memory of ours" : "",
                           options.ordered.value_or(false) ? 1 : 0);
  }
};

// Blocks in any order with holes between them.
void lay_out(Case& c, size_t ranks, bool uneven, Random& random) {
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<size_t> order(ranks), starts(ranks);
    std::iota(order.begin(), order.end(), size_t{0});
    if (uneven) std::shuffle(order.begin(), order.end(), random);
    size_t at = 0;
    for (const size_t r : order) {
      if (uneven) at += random() % 3;
      starts[r] = at;
      at += c.counts[r];
    }
    c.starts.push_back(starts);
    c.sizes.push_back(at + (uneven ? random() % 3 : 0));
  }
}

Case draw(size_t ranks, Random& random) {
  Case c;
  c.kind = static_cast<Kind>(random() % kKinds.size());
  do {
    c.type = static_cast<DataType>(random() % kDataTypes);
    c.op = static_cast<ReduceOp>(random() % kReduceOps);
  } while (!combines(c.type, c.op));
  c.root = static_cast<int>(random() % ranks);
  c.seed = random();
  c.ours = random() % 2 == 0;
  const bool uneven = c.kind == Kind::kReduceScatterV || c.kind == Kind::kAllGatherV;
  c.in_place = !c.exchanges() && random() % 3 == 0;
  const auto length = [&] {
    constexpr std::array<size_t, 4> kMost = {2, 40, 3000, kSanitized ? 6000 : 30'000};
    return random() % kMost[random() % kMost.size()];
  };
  c.counts.assign(ranks, length());
  if (uneven) std::generate(c.counts.begin(), c.counts.end(), length);
  lay_out(c, ranks, uneven, random);
  // The order in which floats are combined shows.
  const bool inexact =
      is_float(c.type) && c.op != ReduceOp::kMin && c.op != ReduceOp::kMax && c.reduces();
  c.options.ordered = inexact || random() % 4 == 0;
  if (random() % 3 == 0) c.options.chunk_bytes = 4096;
  return c;
}

// Floats are finite, and small enough for their sums and products to be.
Bytes elements(DataType type, size_t count, Random random) {
  Bytes out(count * size_of(type));
  for (size_t i = 0; i < count; ++i) {
    std::byte* const to = out.data() + i * size_of(type);
    const uint64_t bits = random();
    const double number = static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-63;
    const auto put = [to](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (type) {
      case DataType::kF32:
        put(static_cast<float>(number));
        break;
      case DataType::kF64:
        put(number);
        break;
      case DataType::kF16:
      case DataType::kBF16:
        put(static_cast<uint16_t>(bits & 0xBFFF));
        break;
      case DataType::kF8E4M3:
      case DataType::kF8E5M2:
        put(static_cast<uint8_t>(bits & 0xBF));
        break;
      case DataType::kBool:
        put(static_cast<uint8_t>(bits % 3 == 0 ? bits >> 8 : bits % 3 - 1));
        break;
      default:
        std::memcpy(to, &bits, size_of(type));
    }
  }
  return out;
}

size_t total(const Case& c) { return std::accumulate(c.counts.begin(), c.counts.end(), size_t{0}); }

// The blocks of a rank's input, in the order of the ranks; of a smaller input: that one block.
Bytes input_of(const Case& c, size_t rank, size_t ranks) {
  const size_t count = c.gives_blocks() ? total(c) : c.counts[rank];
  return elements(c.type, count, Random(c.seed * ranks + rank));
}

Bytes factor_of(const Case& c, size_t rank) { return elements(c.type, 1, Random(c.seed + rank)); }

// All elements of the inputs combined.
Bytes combined(const Case& c, size_t ranks) {
  std::vector<Bytes> inputs;
  std::vector<const void*> sources;
  for (size_t r = 0; r < ranks; ++r) {
    inputs.push_back(input_of(c, r, ranks));
    if (c.op != ReduceOp::kPreMulSum) continue;
    const Bytes factor = factor_of(c, r);
    for (size_t at = 0; at < inputs[r].size(); at += c.element()) {
      std::byte* const one = inputs[r].data() + at;
      collectives::reduce::reference::reduce(c.type, ReduceOp::kProd, one, one, factor.data(), 1);
    }
  }
  for (const Bytes& input : inputs) sources.push_back(input.data());
  Bytes out(inputs[0].size());
  collectives::reduce::reference::fold(c.type, c.op, out.data(), sources, out.size() / c.element(),
                                       c.op == ReduceOp::kAvg ? static_cast<uint32_t>(ranks) : 1);
  return out;
}

// The block of rank `r` in blocks that stand one behind the other.
Bytes block_of(const Case& c, const Bytes& all, size_t r) {
  const size_t first =
      std::accumulate(c.counts.begin(), c.counts.begin() + static_cast<long>(r), size_t{0}) *
      c.element();
  return {all.begin() + static_cast<long>(first),
          all.begin() + static_cast<long>(first + c.counts[r] * c.element())};
}

// The blocks of a rank's output; of a smaller one: that block. Nothing where it has none.
Bytes output_of(const Case& c, size_t rank, size_t ranks) {
  const auto all_inputs = [&](auto part) {
    Bytes out;
    for (size_t r = 0; r < ranks; ++r) {
      const Bytes theirs = part(input_of(c, r, ranks));
      out.insert(out.end(), theirs.begin(), theirs.end());
    }
    return out;
  };
  const bool at_root = static_cast<size_t>(c.root) == rank;
  switch (c.kind) {
    case Kind::kAllReduce:
      return combined(c, ranks);
    case Kind::kReduce:
      return at_root ? combined(c, ranks) : Bytes();
    case Kind::kReduceScatter:
    case Kind::kReduceScatterV:
      return block_of(c, combined(c, ranks), rank);
    case Kind::kAllGather:
    case Kind::kAllGatherV:
      return all_inputs([](const Bytes& input) { return input; });
    case Kind::kGather:
      return at_root ? all_inputs([](const Bytes& input) { return input; }) : Bytes();
    case Kind::kScatter:
      return block_of(c, input_of(c, static_cast<size_t>(c.root), ranks), rank);
    case Kind::kBroadcast:
      return input_of(c, static_cast<size_t>(c.root), ranks);
    case Kind::kAllToAll:
    case Kind::kAllToAllV:
      return all_inputs([&](const Bytes& input) { return block_of(c, input, rank); });
  }
  return {};
}

// A call of this rank: its memory, and what must be in it afterwards.
class Call {
 public:
  Call(Communicator& comm, const Case& c)
      : comm_(comm), c_(c), rank_(static_cast<size_t>(comm.rank())) {}

  ~Call() {
    if (shared_.data != nullptr) comm_.free(shared_);
  }

  absl::Status start() {
    const auto ranks = static_cast<size_t>(comm_.ranks());
    const Bytes input = input_of(c_, rank_, ranks), output = output_of(c_, rank_, ranks);
    const bool wide_in = c_.gives_blocks(), wide_out = c_.gets_blocks();
    const size_t room = (c_.sizes[rank_] + c_.counts[rank_]) * c_.element() + 64;
    if (absl::Status status = allocate(2 * room); !status.ok()) return status;
    std::byte *in = memory_, *out = memory_ + room / 8 * 8;
    const size_t own = c_.starts[rank_][rank_] * c_.element();
    if (c_.in_place) {
      out = in;
      if (wide_in) out = in + own;
      if (wide_out) in = out + own;
    }
    expected_.assign(2 * room, kUntouched);
    put(expected_.data() + (in - memory_), input, wide_in);
    std::memcpy(memory_, expected_.data(), expected_.size());
    put(expected_.data() + (out - memory_), output, wide_out);
    if (c_.op == ReduceOp::kPreMulSum && c_.reduces()) {
      factor_ = factor_of(c_, rank_);
      c_.options.factor = factor_.data();
    }
    absl::StatusOr<Work> work = begin(in, out);
    if (work.ok()) work_ = *work;
    std::fill(factor_.begin(), factor_.end(), kUntouched);
    return work.status();
  }

  absl::Status end() { return comm_.wait(work_); }

  std::string difference() const {
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (memory_[i] != expected_[i]) {
        return absl::StrFormat("byte %u of %u is %x, not %x", i, expected_.size(),
                               std::to_integer<int>(memory_[i]),
                               std::to_integer<int>(expected_[i]));
      }
    }
    return "";
  }

 private:
  absl::Status allocate(size_t bytes) {
    if (!c_.ours) {
      plain_.resize(bytes);
      memory_ = plain_.data();
      return absl::OkStatus();
    }
    absl::StatusOr<CommBuffer> made = comm_.allocate(bytes);
    if (!made.ok()) return made.status();
    shared_ = *made;
    memory_ = shared_.data;
    return absl::OkStatus();
  }

  void put(std::byte* to, const Bytes& blocks, bool wide) const {
    if (!wide || blocks.empty()) {
      std::copy(blocks.begin(), blocks.end(), to);
      return;
    }
    for (size_t r = 0; r < c_.counts.size(); ++r) {
      // Of an all_to_all_v all blocks are as long as that of rank r, of others as their own.
      const Bytes block = block_of(c_, blocks, r);
      std::copy(block.begin(), block.end(), to + c_.starts[rank_][r] * c_.element());
    }
  }

  absl::StatusOr<Work> begin(const void* in, void* out) {
    const size_t count = c_.counts[rank_];
    const std::vector<size_t>& starts = c_.starts[rank_];
    switch (c_.kind) {
      case Kind::kAllReduce:
        return comm_.all_reduce_async(in, out, count, c_.type, c_.op, c_.options);
      case Kind::kReduce:
        return comm_.reduce_async(in, out, count, c_.type, c_.op, c_.root, c_.options);
      case Kind::kReduceScatter:
        return comm_.reduce_scatter_async(in, out, count, c_.type, c_.op, c_.options);
      case Kind::kReduceScatterV: {
        std::vector<size_t> counts = c_.counts, copy = starts;  // gone when the call has begun
        return comm_.reduce_scatter_v_async(in, counts, copy, out, c_.type, c_.op, c_.options);
      }
      case Kind::kAllGather:
        return comm_.all_gather_async(in, out, count, c_.type, c_.options);
      case Kind::kAllGatherV: {
        std::vector<size_t> counts = c_.counts, copy = starts;
        return comm_.all_gather_v_async(in, count, out, counts, copy, c_.type, c_.options);
      }
      case Kind::kScatter:
        return comm_.scatter_async(in, out, count, c_.type, c_.root, c_.options);
      case Kind::kGather:
        return comm_.gather_async(in, out, count, c_.type, c_.root, c_.options);
      case Kind::kBroadcast:
        return comm_.broadcast_async(in, out, count, c_.type, c_.root, c_.options);
      case Kind::kAllToAll:
        return comm_.all_to_all_async(in, out, count, c_.type, c_.options);
      case Kind::kAllToAllV:
        return comm_.all_to_all_v_async(in, c_.counts, starts, out, c_.counts, starts, c_.type,
                                        c_.options);
    }
    return absl::InternalError("no such call");
  }

  Communicator& comm_;
  Case c_;
  const size_t rank_;
  Bytes plain_, expected_, factor_;
  CommBuffer shared_;
  std::byte* memory_ = nullptr;
  Work work_;
};

// Empty, or what was wrong.
std::string run_calls(Communicator& comm, uint64_t seed) {
  Random random(seed);
  const auto ranks = static_cast<size_t>(comm.ranks());
  for (int batch = 0; batch < (kSanitized ? 12 : 40); ++batch) {
    std::vector<Case> cases;
    for (uint64_t calls = random() % 4 + 1; calls > 0; --calls) {
      cases.push_back(draw(ranks, random));
    }
    std::vector<std::unique_ptr<Call>> open;
    for (const Case& c : cases) {
      open.push_back(std::make_unique<Call>(comm, c));
      if (absl::Status status = open.back()->start(); !status.ok()) {
        return absl::StrCat(c.describe(), " did not begin: ", std::string(status.message()));
      }
    }
    for (size_t i = open.size(); i-- > 0;) {
      if (absl::Status status = open[i]->end(); !status.ok()) {
        return absl::StrCat(cases[i].describe(), ": ", std::string(status.message()));
      }
      const std::string difference = open[i]->difference();
      if (!difference.empty()) return absl::StrCat(cases[i].describe(), ": ", difference);
    }
  }
  return "";
}

// Promise(collectives): Every call gives what its definition says, bit by bit | random calls of all
//   kinds, types, operations and layouts among processes, against a model
TEST(Model, RandomCallsOfForkedRanksGiveWhatItSays) {
  const Seeds seeds(kSanitized ? 1 : 2);
  for (const char* provider : {"shm", "tcp"}) {
    for (const int ranks : {1, 2, 3, 5}) {
      for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
        const auto ended = launch::fork_ranks(
            {.ranks = ranks, .key = test_key()}, [&](const launch::Place& place, int) {
              CommunicatorOptions options = test_options(provider);
              options.rank = place.rank;
              options.ranks = place.ranks;
              options.rendezvous = place.rendezvous;
              const auto comm = Communicator::create(options);
              const std::string wrong =
                  comm.ok() ? run_calls(**comm, seed) : std::string(comm.status().message());
              if (wrong.empty()) return 0;
              std::fprintf(stderr, "%s, rank %d of %d, seed %d: %s\n", provider, place.rank, ranks,
                           static_cast<int>(seed), wrong.c_str());
              return 1;
            });
        ASSERT_TRUE(ended.ok()) << ended.status();
        ASSERT_EQ(*ended, 0) << provider << ", " << ranks << " ranks: BATON_SEED=" << seed;
      }
    }
  }
}

class EveryAlgorithm : public testing::TestWithParam<std::tuple<const char*, int>> {};

// Where floats are combined in order their bits are the same for every algorithm, cut and provider.
// Chunks as large as slots make messages that wait for a grant and shorter ones that do not.
TEST_P(EveryAlgorithm, GivesWhatTheModelSays) {
  using C = Collective;
  constexpr std::pair<Kind, Collective> kSwept[] = {{Kind::kAllReduce, C::kAllReduce},
                                                    {Kind::kReduce, C::kReduce},
                                                    {Kind::kReduceScatter, C::kReduceScatter},
                                                    {Kind::kAllGather, C::kAllGather},
                                                    {Kind::kScatter, C::kScatter},
                                                    {Kind::kGather, C::kGather},
                                                    {Kind::kBroadcast, C::kBroadcast},
                                                    {Kind::kAllToAll, C::kAllToAll}};
  constexpr std::array kOrdered = {DataType::kF32, DataType::kBF16, DataType::kF16};
  constexpr std::array<size_t, 3> kChunks = {4096, 512, 0};
  const auto [provider, ranks] = GetParam();
  CommunicatorOptions options = test_options(provider);
  if (options.worker.providers[0] == "tcp") options.node_size = 2;
  run_group(ranks, options, [&](Communicator& comm) {
    Random random(1);
    uint64_t turn = 0;
    const auto try_one = [&](Case c, size_t count) {
      c.seed = ++turn;
      c.ours = turn % 2 == 0;
      c.type = *c.options.ordered ? kOrdered[turn / 2 % 3] : DataType::kI32;
      const bool fills_slots = count > 5000 && !c.in_place;
      c.options.chunk_bytes = fills_slots ? 0 : kChunks[turn / 6 % 3];
      c.counts.assign(static_cast<size_t>(comm.ranks()), count);
      lay_out(c, c.counts.size(), false, random);
      Call call(comm, c);
      absl::Status status = call.start();
      if (status.ok()) status = call.end();
      ASSERT_TRUE(status.ok() && call.difference().empty())
          << name_of(*c.options.algorithm) << ": " << c.describe() << ": " << status << ", "
          << call.difference();
    };
    for (const auto& [kind, collective] : kSwept) {
      for (const bool ordered : {false, true}) {
        for (const Algorithm algorithm :
             collectives::schedules::algorithms_for(collective, ordered)) {
          Case c;
          c.kind = kind;
          if (ordered && !c.reduces()) break;
          c.options.ordered = ordered;
          c.options.algorithm = algorithm;
          const int roots = collectives::schedules::rooted(collective) ? comm.ranks() : 1;
          const int next = roots > 3 ? 2 : 1;
          for (c.root = 0; c.root < roots; c.root += next) {
            for (const size_t count : {0, 1, 17, 1000, kSanitized ? 5003 : 20'011}) {
              for (const bool in_place : {false, true}) {
                c.in_place = in_place && !c.exchanges();
                try_one(c, count);
                if (testing::Test::HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, EveryAlgorithm,
                         testing::Combine(testing::Values("shm", "tcp"),
                                          testing::Values(1, 2, 3, 5)),
                         [](const auto& param) {
                           return absl::StrCat(std::get<0>(param.param), "_",
                                               std::get<1>(param.param));
                         });

}  // namespace
}  // namespace baton::model_test

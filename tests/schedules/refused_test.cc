// Broken schedules are refused, with an error that names the rank and the step.
#include "collectives/schedules/schedule.h"
#include "tests/schedules/verify.h"
#include "tests/test.h"

namespace baton::collectives::schedules {
namespace {

using testing::HasSubstr;
using Kind = Step::Kind;
using Edit = std::function<void(uint32_t rank, std::vector<Step>& steps)>;

// What the verifier says to a schedule that somebody has edited.
std::string refusal(const ScheduleSpec& spec, const Edit& edit) {
  const auto report = proof::verify(spec, [&](uint32_t rank, uint32_t channel) {
    absl::StatusOr<Program> program = write_program(spec, rank, channel);
    if (program.ok()) edit(rank, program->steps);
    return program;
  });
  return report.ok() ? "accepted" : std::string(report.status().message());
}

// Of one rank's program.
Edit at(uint32_t rank, const std::function<void(std::vector<Step>& steps)>& edit) {
  return [rank, edit](uint32_t r, std::vector<Step>& steps) {
    if (r == rank) edit(steps);
  };
}

// Steps of ring all_reduce: send, receive_reduce (x n - 1), send, receive (x n - 1).
ScheduleSpec ring(uint32_t ranks = 4) { return {.algorithm = Algorithm::kRing, .ranks = ranks}; }
ScheduleSpec direct(Collective collective, uint32_t ranks) {
  return {.collective = collective, .algorithm = Algorithm::kDirect, .ranks = ranks};
}

// Both send what both overwrite at once. With separate buffers that is right, in place it waits.
void exchange_at_once(uint32_t rank, std::vector<Step>& steps) {
  steps = {{.kind = Kind::kSend, .peer = 1 - rank},
           {.kind = Kind::kReceiveReduce,
            .final = true,
            .peer = 1 - rank,
            .target = {BufferName::kOutput, 0}}};
}

// Rank 1 sends its own to rank 0 twice, which takes it instead of what rank 2 sends.
void send_twice(uint32_t rank, std::vector<Step>& steps) {
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step step = steps[i];
    if (rank == 0 && step.kind == Kind::kReceiveReduce) steps[i].peer = 1;
    if (rank != 1 || step.kind != Kind::kSend || step.peer != 0) continue;
    steps.insert(steps.begin() + i, step);
    return;
  }
}

using Steps = std::vector<Step>;

TEST(Refused, WithItsPlaceAndReason) {
  const ScheduleSpec halving{.algorithm = Algorithm::kHalvingDoubling, .ranks = 4};
  const ScheduleSpec reduce{
      .collective = Collective::kReduce, .algorithm = Algorithm::kRing, .ranks = 3};
  const ScheduleSpec two{.algorithm = Algorithm::kRecursiveDoubling, .ranks = 2};
  ScheduleSpec separate = two, ordered = direct(Collective::kAllReduce, 4);
  separate.separate = true;
  ordered.ordered = true;
  const Place in{BufferName::kInput, 0}, out{BufferName::kOutput, 0}, other{BufferName::kOutput, 1};
  const struct {
    ScheduleSpec spec;
    Edit edit;
    std::vector<const char*> says;
  } cases[] = {
      {ring(), at(0, [](Steps&) {}), {"accepted"}},
      {ring(),
       at(1, [](Steps& s) { s.erase(s.begin() + 10); }),
       {"rank 2", "step 11 (receive)", "channel 0", "a message from rank 1"}},
      {ring(),
       at(2, [](Steps& s) { s.erase(s.begin() + 11); }),
       {"rank 1", "step 10 (send)", "never receives"}},
      {ring(), at(1, [](Steps& s) { s[0].peer = 3; }), {"rank ", "step "}},
      {ring(), at(1, [](Steps& s) { s[0].peer = 9; }), {"rank 1", "step 0", "no peer 9"}},
      {ring(), at(1, [](Steps& s) { s[0].peer = 1; }), {"rank 1", "step 0", "no peer 1"}},
      {halving,
       at(0, [](Steps& s) { s[0].parts = 1; }),
       {"rank 2", "step 1 (receive_reduce)", "expects 2 parts from rank 0, whose step 0 sends 1"}},
      {ring(),
       at(0, [](Steps& s) { s[0].parts = 2, s[0].source.part = 0; }),
       {"rank 0", "step 0", "at most 1"}},
      {direct(Collective::kAllReduce, 3),
       send_twice,
       {"rank 0", "(receive_reduce)", "to part 0 twice"}},
      {ring(),
       at(0, [](Steps& s) { s[1].source.part ^= 1; }),
       {"rank 0", "step 1", "different parts"}},
      {ring(),
       at(3, [](Steps& s) { s[0].source.buffer = BufferName::kOutput; }),
       {"rank 3", "step 0 (send)", "before anything is there"}},
      {ring(),
       at(3,
          [](Steps& s) {
            s[1].target = {BufferName::kScratch, 0};
          }),
       {"rank 3", "step 1", "outside its 0 parts"}},
      {ring(),
       at(3, [](Steps& s) { s[1].target.buffer = BufferName::kInput; }),
       {"rank 3", "step 1", "writes to the input"}},
      {reduce,
       at(1,
          [&](Steps& s) {
            for (Step& step : s) step.target = out;
          }),
       {"rank 1", "no output part 0"}},
      {ring(),
       at(2, [](Steps& s) { s[5].final = false; }),
       {"no final combination", "rank 0", "step "}},
      {ring(), at(2, [](Steps& s) { s[1].final = true; }), {"rank 3", "step 3", "after its final"}},
      {ring(),
       at(2, [](Steps& s) { s[0].final = true; }),
       {"rank 2", "step 0", "combines nothing"}},
      // Everybody waits for everybody.
      {ring(),
       [](uint32_t, Steps& s) { std::swap(s[0], s[1]); },
       {"rank 0", "step 0 (receive_reduce)", "waits for ever for a message from rank 3"}},
      // More messages ahead than there is room for.
      {direct(Collective::kAllReduce, 2),
       [](uint32_t, Steps& s) { s.insert(s.begin(), 2, Step(s[0])); },
       {"step 2 (send)", "waits for ever to send"}},
      {two, exchange_at_once, {"in place", "step 1", "waits for ever", "overwrite"}},
      {separate, exchange_at_once, {"accepted"}},
      // Right with separate buffers; in place the first step destroys what the third one sends.
      {direct(Collective::kAllGather, 2),
       at(0,
          [&](Steps& s) {
            s = {{.kind = Kind::kReceive, .peer = 1, .target = out},
                 {.kind = Kind::kCopy, .source = out, .target = other},
                 {.kind = Kind::kSend, .peer = 1, .source = in},
                 {.kind = Kind::kCopy, .source = in, .target = out}};
          }),
       {"in place", "rank 0", "output part 0 with other contributions"}},
      {direct(Collective::kAllToAll, 3),
       at(1,
          [](Steps& s) { std::erase_if(s, [](const Step& x) { return x.kind == Kind::kCopy; }); }),
       {"rank 1", "never written"}},
      {ordered,
       at(0, [](Steps& s) { std::swap(s[3].target, s[4].target); }),
       {"rank 0", "(fold)", "not in its place"}},
      // Rank 7 sends its own part on instead of the sum: fingerprints see it.
      {ring(100),
       at(7,
          [](Steps& s) {
            for (size_t i = 2; s[i + 1].kind == Kind::kReceiveReduce; i += 2) {
              s[i].source.buffer = BufferName::kInput;
            }
          }),
       {"rank ", "step ", "other contributions"}},
  };
  for (const auto& [spec, edit, says] : cases) {
    const std::string why = refusal(spec, edit);
    for (const char* part : says) EXPECT_THAT(why, HasSubstr(part));
  }
}

// Sums that depend on who met whom are not ordered, however complete.
TEST(Refused, SumsWhereAFoldIsWanted) {
  ScheduleSpec ordered = direct(Collective::kAllReduce, 4);
  ordered.ordered = true;
  const auto unordered = proof::verify(ordered, [](uint32_t rank, uint32_t channel) {
    return write_program(direct(Collective::kAllReduce, 4), rank, channel);
  });
  EXPECT_THAT(std::string(unordered.status().message()), HasSubstr("only folds"));
}

}  // namespace
}  // namespace baton::collectives::schedules

// The verifier's front: each channel of a schedule, with separate buffers and in place.
#include "tests/schedules/verify.h"

#include "tests/schedules/verify_run.h"

namespace baton::collectives::proof {

using schedules::ScheduleSpec;

namespace {

bool can_be_in_place(const ScheduleSpec& spec) {
  return !spec.separate && spec.collective != Collective::kAllToAll &&
         spec.collective != Collective::kBarrier;
}

}  // namespace

absl::StatusOr<VerifyReport> verify(const ScheduleSpec& spec, const ProgramSource& program,
                                    uint32_t sampled_parts) {
  if (absl::Status valid = schedules::validate(spec); !valid.ok()) return valid;
  const symbolic::Contributions contributions(spec, sampled_parts);
  VerifyReport report;
  for (uint32_t channel = 0; channel < spec.channels; ++channel) {
    symbolic::Run run(spec, contributions, channel);
    absl::Status status = run.load(program);
    if (status.ok()) status = run.run(false, report);
    if (status.ok() && can_be_in_place(spec)) status = run.run(true, report);
    if (!status.ok()) return status;
  }
  return report;
}

absl::StatusOr<VerifyReport> verify(const ScheduleSpec& spec, uint32_t sampled_parts) {
  return verify(
      spec, [&spec](uint32_t rank, uint32_t channel) { return write_program(spec, rank, channel); },
      sampled_parts);
}

}  // namespace baton::collectives::proof

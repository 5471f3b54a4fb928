// Where the flight recorder goes when a call fails.
#pragma once

#include <cstdint>
#include <string>

#include "collectives/flight_recorder.h"

namespace baton::collectives {

// The file of one rank of a group. $BATON_FLIGHT_RECORDER gives everything before ".<rank>.json";
// "none" is no file (empty path). Without it: baton-flight-<user id>-<group> in the directory for
// temporary files, so that each group keeps its latest failure and no more.
std::string flight_path(const std::string& group, uint32_t rank);

// Writes the recorder's JSON, readable to this user only; never through a link that somebody else
// may have put there. Says what was done, for the end of an error message: "; its last events are
// in FILE", why they are not, or nothing where they are not wanted.
std::string dump_flight_record(const FlightRecorder& recorder, const std::string& path);

}  // namespace baton::collectives

// `baton kv_file_bw`: how fast records of a KV tier are read from disk, beside fio.
//
// Records as an engine's tier on disk writes them, in a file of its own kind (DiskTier), are read
// in random order past the page cache: by the tier's reader alone, by the tier with the check of
// each record's sum, and by fio (io_uring, registered buffers and file, as many reads at a time, of
// the same size, over the same file). They take turns, and medians are compared. Without fio the
// rows have no floor, and the output says what to install.
#pragma once

namespace baton::bench {

int kv_file_bw_main(int argc, char** argv);

}  // namespace baton::bench

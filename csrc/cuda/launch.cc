#include "cuda/launch_util.h"

namespace ep {

void load_kernels() {
  load_dispatch_kernels();
  load_combine_kernels();
}

}  // namespace ep

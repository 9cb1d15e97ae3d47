export PYTHONPATH=$PWD
build() { cmake -S . -B build/gpu -G Ninja -DNCCL_EP_CUDA=ON -DNCCL_EP_BUILD_TESTS=OFF -DNCCL_EP_BUILD_C_LIBRARY=OFF -DCMAKE_CUDA_FLAGS="$1" -DPython_EXECUTABLE=$(command -v python3) > $OUT/cmake.log 2>&1 && cmake --build build/gpu --parallel 32 > $OUT/build.log 2>&1; tail -1 $OUT/build.log; grep -E "error" $OUT/build.log | head; }
